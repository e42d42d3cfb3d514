//! The extender as kube-scheduler calls it (`pkg/scheduler/extender.go`): plain HTTP, node names only (`nodeCacheCapable`), Go's
//! field names.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cluster::api::object::{items, name, namespace, uid};

/// How the extender is reached, as in the scheduler's configuration.
#[derive(Clone, Debug)]
pub struct ExtenderConfig {
    /// `urlPrefix`; verbs are appended: `filter`, `prioritize`, `bind`.
    pub url: String,
    /// `managedResources`: pods that name none of these are none of its business.
    pub managed: Vec<String>,
    /// `httpTimeout`.
    pub timeout: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Extender {
    config: ExtenderConfig,
    client: Client<HttpConnector, Full<Bytes>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Filtered {
    pub(super) node_names: Option<Vec<String>>,
    pub(super) failed_nodes: Option<BTreeMap<String, String>>,
    pub(super) failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    error: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Scored {
    host: String,
    score: i64,
}

impl Extender {
    pub(super) fn new(config: ExtenderConfig) -> Self {
        Self { config, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Whether a pod names a managed resource, be it with the value 0 or in an init container alone.
    pub(super) fn is_interested(&self, pod: &Value) -> bool {
        let containers =
            ["containers", "initContainers"].into_iter().flat_map(|list| items(&pod["spec"], list));
        let mut lists = containers.flat_map(|c| ["requests", "limits"].map(|list| &c["resources"][list]));
        lists.any(|list| self.config.managed.iter().any(|resource| list.get(resource).is_some()))
    }

    pub(super) async fn filter(&self, pod: &Value, nodes: &[String]) -> Result<Filtered, String> {
        let answer: Filtered =
            self.call("filter", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes})).await?;
        if answer.error.is_empty() { Ok(answer) } else { Err(answer.error) }
    }

    /// Scores by node name; none where it failed, as the scheduler then goes on without.
    pub(super) async fn prioritize(&self, pod: &Value, nodes: &[String]) -> BTreeMap<String, i64> {
        let answer = self.call("prioritize", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes})).await;
        let scores: Vec<Scored> = answer.unwrap_or_else(|error| {
            tracing::debug!(error, "prioritize");
            Vec::new()
        });
        scores.into_iter().map(|scored| (scored.host, scored.score)).collect()
    }

    pub(super) async fn bind(&self, pod: &Value, node: &str) -> Result<(), String> {
        let body =
            json!({"PodName": name(pod), "PodNamespace": namespace(pod), "PodUID": uid(pod), "Node": node});
        let answer: Value = self.call("bind", &body).await?;
        match answer["Error"].as_str() {
            None | Some("") => Ok(()),
            Some(error) => Err(error.to_owned()),
        }
    }

    async fn call<T: serde::de::DeserializeOwned>(&self, verb: &str, body: &Value) -> Result<T, String> {
        let url = format!("{}/{verb}", self.config.url.trim_end_matches('/'));
        let request = Request::post(&url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, "Go-http-client/1.1")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| error.to_string())?;
        let exchange = async {
            let response =
                self.client.request(request).await.map_err(|error| format!("Post {url}: {error}"))?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
            if !status.is_success() {
                return Err(format!("failed {verb} with extender at URL {url}, code {}", status.as_u16()));
            }
            serde_json::from_slice(&body).map_err(|error| error.to_string())
        };
        match tokio::time::timeout(self.config.timeout, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("Post {url}: context deadline exceeded")),
        }
    }
}
