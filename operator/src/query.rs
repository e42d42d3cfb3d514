//! A gate's Prometheus query: one instant query, whose largest value counts.

use gpu_migrate_model::crd::GateQuery;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);
const LARGEST_ANSWER: usize = 1 << 20;

/// Sends the query. Plain HTTP: Prometheus is reached inside the cluster.
pub(crate) async fn evaluate(query: &GateQuery) -> Result<f64, String> {
    let address = address(query)?;
    let client: Client<HttpConnector, Empty<&[u8]>> = Client::builder(TokioExecutor::new()).build_http();
    let answer = async {
        let response = client.get(address).await.map_err(|error| format!("{}: {error}", query.url))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST_ANSWER)
            .collect()
            .await
            .map_err(|error| format!("{}: {error}", query.url))?
            .to_bytes();
        if !status.is_success() {
            return Err(format!("{}: status {status}: {}", query.url, String::from_utf8_lossy(&body)));
        }
        value(&body)
    };
    tokio::time::timeout(TIMEOUT, answer)
        .await
        .unwrap_or_else(|_| Err(format!("{}: no answer within {TIMEOUT:?}", query.url)))
}

fn address(query: &GateQuery) -> Result<http::Uri, String> {
    if !query.url.starts_with("http://") {
        return Err(format!("url {:?}: expected http://…", query.url));
    }
    let escaped = query
        .promql
        .bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect::<String>();
    format!("{}/api/v1/query?query={escaped}", query.url.trim_end_matches('/'))
        .parse()
        .map_err(|error| format!("url {:?}: {error}", query.url))
}

/// The largest value of an answer, scalar or vector: one series that is too high fails the gate. An empty result is an error: a
/// query about workloads that report nothing must not pass.
fn value(body: &[u8]) -> Result<f64, String> {
    let answer: Value =
        serde_json::from_slice(body).map_err(|error| format!("the answer is not JSON: {error}"))?;
    let result = answer.pointer("/data/result").and_then(Value::as_array);
    let texts = result.into_iter().flatten().filter_map(|series| series.pointer("/value/1").or(Some(series)));
    let mut largest: Option<f64> = None;
    // Of a scalar the first part is its time, a number.
    for text in texts.filter_map(Value::as_str) {
        let value =
            text.parse::<f64>().map_err(|_| format!("the query returned {text:?}, expected a number"))?;
        if value.is_nan() {
            return Err("the query returned NaN".to_owned());
        }
        largest = Some(largest.map_or(value, |largest| largest.max(value)));
    }
    largest.ok_or_else(|| "the query returned no value".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_largest_value_counts_and_an_empty_result_is_an_error() {
        let of = |result: Value| value(json!({"data": {"result": result}}).to_string().as_bytes());
        assert_eq!(of(json!([{"metric": {}, "value": [1.5, "0.25"]}])), Ok(0.25));
        let two = json!([{"metric": {"pod": "a"}, "value": [1.5, "0.25"]}, {"metric": {"pod": "b"}, "value": [1.5, "9"]}]);
        assert_eq!(of(two), Ok(9.0), "the second series is the one that is too high");
        assert_eq!(of(json!([1.5, "3"])), Ok(3.0));
        assert_eq!(of(json!([])), Err("the query returned no value".into()));
        assert_eq!(of(json!([{"value": [1, "NaN"]}])), Err("the query returned NaN".into()));
        assert!(value(b"<html>").is_err());
    }

    #[test]
    fn the_query_is_escaped() {
        let query = GateQuery {
            url: "http://p:9090/".into(),
            promql: "sum(rate(x{a=\"b c\"}[5m]))".into(),
            max: 0.0,
        };
        assert_eq!(
            address(&query).unwrap().to_string(),
            "http://p:9090/api/v1/query?query=sum%28rate%28x%7Ba%3D%22b%20c%22%7D%5B5m%5D%29%29"
        );
        assert!(
            address(&GateQuery { url: "https://p".into(), ..query })
                .unwrap_err()
                .contains("expected http://")
        );
    }

    #[tokio::test]
    async fn it_queries_over_http() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answers = axum::Router::new().route(
            "/api/v1/query",
            axum::routing::get(|| async { r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"7"]}]}}"# }),
        );
        let server = tokio::spawn(async move { axum::serve(listener, answers).await });
        let query = GateQuery { url: url.clone(), promql: "up".into(), max: 0.0 };
        assert_eq!(evaluate(&query).await, Ok(7.0));
        server.abort();
        let _ = server.await;
        assert!(evaluate(&query).await.unwrap_err().starts_with(&url));
    }
}
