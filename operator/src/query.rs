//! Instant queries of Prometheus: the one of a gate, whose largest value counts, and those of `gpu-migrate suggest`.

use gpu_migrate_model::crd::GateQuery;
use http::Request;
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

/// How Prometheus is reached. Both files are read again for each query.
#[derive(Clone, Debug)]
pub struct Prometheus {
    /// CAs that sign its certificate, PEM; the system's where there is none.
    pub ca_file: Option<PathBuf>,
    /// The bearer token. It is sent over TLS only.
    pub token_file: Option<PathBuf>,
    /// For one query, from the connection to the end of the answer.
    pub timeout: Duration,
    /// Bytes of an answer; a longer one is an error.
    pub largest_answer: usize,
}

impl Default for Prometheus {
    /// For a gate, whose query has a few series.
    fn default() -> Self {
        Self { ca_file: None, token_file: None, timeout: Duration::from_secs(10), largest_answer: 1 << 20 }
    }
}

impl Prometheus {
    /// The largest value of a gate's query.
    ///
    /// # Errors
    /// With a text for the owner: as [`Self::query`], and an answer without a value.
    pub async fn evaluate(&self, query: &GateQuery) -> Result<f64, String> {
        largest(&self.query(&query.url, &query.promql).await?)
    }

    /// Sends an instant query to the server at `url`. The answer is the whole of Prometheus' JSON, with the series in `data.result`.
    ///
    /// # Errors
    /// With a text for the owner: no server, a wrong certificate, a query that Prometheus refuses, no answer in time.
    pub async fn query(&self, url: &str, promql: &str) -> Result<Value, String> {
        let answer = async {
            let at = |error: &dyn Display| format!("{url}: {error}");
            let request = request(url, promql)?;
            let config = self.config(url).await.map_err(|error| at(&error))?;
            let client = Client::try_from(config).map_err(|error| at(&error))?;
            let response = client.send(request).await.map_err(|error| at(&error))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), self.largest_answer).collect();
            let body = body.await.map_err(|error| at(&error))?.to_bytes();
            if !status.is_success() {
                return Err(format!("{url}: status {status}: {}", String::from_utf8_lossy(&body)));
            }
            serde_json::from_slice(&body).map_err(|error| format!("{url}: the answer is not JSON: {error}"))
        };
        tokio::time::timeout(self.timeout, answer)
            .await
            .unwrap_or_else(|_| Err(format!("{url}: no answer within {:?}", self.timeout)))
    }

    /// kube's client knows TLS and tokens that are renewed; Prometheus is one more server to it.
    async fn config(&self, url: &str) -> Result<Config, Box<dyn std::error::Error + Send + Sync>> {
        let token = self.token_file.as_ref().filter(|_| url.starts_with("https://"));
        let kubeconfig: Kubeconfig = serde_json::from_value(json!({
            "clusters": [{"name": "p", "cluster": {"server": url, "certificate-authority": self.ca_file}}],
            "users": [{"name": "p", "user": {"tokenFile": token}}],
            "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
            "current-context": "p",
        }))?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.proxy_url = None;
        (config.connect_timeout, config.read_timeout) = (Some(self.timeout), Some(self.timeout));
        Ok(config)
    }
}

fn request(url: &str, promql: &str) -> Result<Request<Body>, String> {
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(format!("url {url:?}: expected http://… or https://…"));
    }
    let escaped = promql
        .bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect::<String>();
    let path = format!("/api/v1/query?query={escaped}");
    Request::get(path).body(Body::empty()).map_err(|error| format!("query {promql:?}: {error}"))
}

/// The largest value of an answer, scalar or vector: one series that is too high fails the gate. An empty result is an error: a
/// query about workloads that report nothing must not pass.
fn largest(answer: &Value) -> Result<f64, String> {
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
        let of = |result: Value| largest(&json!({"data": {"result": result}}));
        assert_eq!(of(json!([{"metric": {}, "value": [1.5, "0.25"]}])), Ok(0.25));
        let two = json!([{"metric": {"pod": "a"}, "value": [1.5, "0.25"]}, {"metric": {"pod": "b"}, "value": [1.5, "9"]}]);
        assert_eq!(of(two), Ok(9.0), "the second series is the one that is too high");
        assert_eq!(of(json!([1.5, "3"])), Ok(3.0));
        assert_eq!(of(json!([])), Err("the query returned no value".into()));
        assert_eq!(of(json!([{"value": [1, "NaN"]}])), Err("the query returned NaN".into()));
        assert!(largest(&json!("<html>")).is_err());
    }

    #[test]
    fn the_query_is_escaped() {
        let promql = "sum(rate(x{a=\"b c\"}[5m]))";
        assert_eq!(
            request("http://p:9090/", promql).unwrap().uri(),
            "/api/v1/query?query=sum%28rate%28x%7Ba%3D%22b%20c%22%7D%5B5m%5D%29%29"
        );
        let error = request("ftp://p", promql).unwrap_err();
        assert!(error.contains("expected http://"), "{error}");
    }

    #[tokio::test]
    async fn the_token_is_sent_over_tls_only_to_a_server_that_the_ca_vouches_for() {
        gpu_migrate_runtime::install_crypto_provider();
        let folder = tempfile::tempdir().unwrap();
        let (ca_file, token_file) = (folder.path().join("ca.crt"), folder.path().join("token"));
        std::fs::write(&token_file, "secret").unwrap();
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(&ca_file, made.cert.pem()).unwrap();
        let prometheus =
            Prometheus { ca_file: Some(ca_file), token_file: Some(token_file), ..Prometheus::default() };
        let of = |url: &str| GateQuery { url: url.into(), promql: "up".into(), ..GateQuery::default() };
        let token = |config: Config| config.auth_info.token_file;
        let tls = prometheus.config("https://127.0.0.1:1/prefix").await.unwrap();
        assert_eq!(tls.root_cert.as_ref().unwrap().len(), 1);
        assert_eq!(tls.cluster_url.path(), "/prefix");
        assert!(token(tls).is_some());
        assert_eq!(token(prometheus.config("http://127.0.0.1:1").await.unwrap()), None);
        let missing = Prometheus { ca_file: Some(folder.path().join("none")), ..Prometheus::default() };
        assert!(missing.evaluate(&of("https://127.0.0.1:1")).await.unwrap_err().contains("none"));
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
        let query = GateQuery { url: url.clone(), promql: "up".into(), ..GateQuery::default() };
        gpu_migrate_runtime::install_crypto_provider();
        let prometheus = Prometheus::default();
        assert_eq!(prometheus.evaluate(&query).await, Ok(7.0));
        server.abort();
        let _ = server.await;
        assert!(prometheus.evaluate(&query).await.unwrap_err().starts_with(&url));
    }
}
