//! Tables: what `kubectl get` prints is made on the server.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::jsonpath;
use super::kinds::Kind;
use super::object::{items, meta, name};

/// A column and how its cells come about.
struct Column {
    name: String,
    kind: String,
    priority: i64,
    cell: Cell,
}

enum Cell {
    Path(String),
    /// Since the first of these times that is there.
    Age(Vec<String>),
    Made(fn(&Value) -> Value),
}

impl Column {
    fn made(name: &str, kind: &str, cell: fn(&Value) -> Value) -> Self {
        Self { name: name.into(), kind: kind.into(), priority: 0, cell: Cell::Made(cell) }
    }

    fn path(name: &str, path: &str) -> Self {
        Self { name: name.into(), kind: "string".into(), priority: 0, cell: Cell::Path(path.into()) }
    }

    fn age() -> Self {
        let cell = Cell::Age(vec![".metadata.creationTimestamp".into()]);
        Self { name: "Age".into(), kind: "string".into(), priority: 0, cell }
    }

    fn wide(mut self) -> Self {
        self.priority = 1;
        self
    }

    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        match &self.cell {
            Cell::Made(make) => make(object),
            Cell::Path(path) => jsonpath::find(object, path).unwrap_or_else(|| "<none>".into()),
            Cell::Age(paths) => paths
                .iter()
                .find_map(|path| jsonpath::find(object, path)?.as_str()?.parse::<Timestamp>().ok())
                .map_or_else(|| "<unknown>".into(), |time| age(now.duration_since(time).as_secs()).into()),
        }
    }
}

/// A `Table` of objects. `version` is the list's resource version; `include` says what of each object comes along
/// (`Metadata`, `Object`, `None`).
#[must_use]
pub fn render(kind: &Kind, objects: &[&Value], version: &str, include: &str, now: Timestamp) -> Value {
    let columns = columns(kind);
    let definitions: Vec<Value> = columns
        .iter()
        .map(|column| {
            let format = if column.name == "Name" { "name" } else { "" };
            json!({"name": column.name, "type": column.kind, "format": format, "description": "", "priority": column.priority})
        })
        .collect();
    let rows = objects.iter().map(|object| {
        let cells: Vec<Value> = columns.iter().map(|column| column.cell(object, now)).collect();
        let mut row = json!({"cells": cells});
        match include {
            "None" => {}
            "Object" => row["object"] = (*object).clone(),
            _ => row["object"] = partial(object),
        }
        row
    });
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": definitions, "rows": rows.collect::<Vec<_>>(),
    })
}

/// Only the metadata of an object.
#[must_use]
pub fn partial(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn columns(kind: &Kind) -> Vec<Column> {
    let mut columns = vec![Column::made("Name", "string", |o| name(o).into())];
    if let Some(custom) = &kind.custom {
        columns.extend(custom.columns.as_array().into_iter().flatten().map(custom_column));
        if custom.columns.as_array().is_none_or(Vec::is_empty) {
            columns.push(Column::age());
        }
        return columns;
    }
    let (rest, age) = match (kind.group.as_str(), kind.plural.as_str()) {
        ("", "pods") => (
            vec![
                Column::made("Ready", "string", ready_containers),
                Column::made("Status", "string", pod_status),
                Column::made("Restarts", "integer", restarts),
            ],
            vec![
                Column::age(),
                Column::path("IP", ".status.podIP").wide(),
                Column::path("Node", ".spec.nodeName").wide(),
            ],
        ),
        ("", "nodes") => (
            vec![Column::made("Status", "string", node_status)],
            vec![Column::age(), Column::path("Version", ".status.nodeInfo.kubeletVersion")],
        ),
        ("", "namespaces") => (vec![Column::path("Status", ".status.phase")], vec![Column::age()]),
        ("", "secrets") => {
            (vec![Column::path("Type", ".type"), Column::made("Data", "integer", data)], vec![Column::age()])
        }
        ("", "configmaps") => (vec![Column::made("Data", "integer", data)], vec![Column::age()]),
        ("" | "events.k8s.io", "events") => {
            let times = ["series.lastObservedTime", "lastTimestamp", "deprecatedLastTimestamp", "eventTime"];
            return vec![
                Column {
                    cell: Cell::Age(times.map(|time| format!(".{time}")).into()),
                    name: "Last Seen".into(),
                    ..Column::age()
                },
                Column::path("Type", ".type"),
                Column::path("Reason", ".reason"),
                Column::made("Object", "string", |o| {
                    let of =
                        if o["involvedObject"].is_object() { &o["involvedObject"] } else { &o["regarding"] };
                    let text = |key: &str| of[key].as_str().unwrap_or_default().to_owned();
                    format!("{}/{}", text("kind").to_lowercase(), text("name")).into()
                }),
                Column::made("Message", "string", |o| {
                    if o["message"].is_string() { o["message"].clone() } else { o["note"].clone() }
                }),
            ];
        }
        ("apps", "deployments") => (
            vec![
                Column::made("Ready", "string", |o| {
                    format!(
                        "{}/{}",
                        o["status"]["readyReplicas"].as_u64().unwrap_or(0),
                        o["spec"]["replicas"]
                    )
                    .into()
                }),
                Column::made("Up-to-date", "string", |o| {
                    o["status"]["updatedReplicas"].as_u64().unwrap_or(0).into()
                }),
                Column::made("Available", "string", |o| {
                    o["status"]["availableReplicas"].as_u64().unwrap_or(0).into()
                }),
            ],
            vec![Column::age()],
        ),
        ("apps", "replicasets") => (
            vec![
                Column::path("Desired", ".spec.replicas"),
                Column::made("Current", "integer", |o| o["status"]["replicas"].as_u64().unwrap_or(0).into()),
                Column::made("Ready", "integer", |o| {
                    o["status"]["readyReplicas"].as_u64().unwrap_or(0).into()
                }),
            ],
            vec![Column::age()],
        ),
        ("coordination.k8s.io", "leases") => {
            (vec![Column::path("Holder", ".spec.holderIdentity")], vec![Column::age()])
        }
        ("apiextensions.k8s.io", _) => {
            (vec![], vec![Column::path("Created At", ".metadata.creationTimestamp")])
        }
        _ => (vec![], vec![Column::age()]),
    };
    columns.extend(rest);
    columns.extend(age);
    columns
}

fn custom_column(definition: &Value) -> Column {
    let text = |key: &str| definition[key].as_str().unwrap_or_default().to_owned();
    let path = text("jsonPath");
    Column {
        name: text("name"),
        kind: text("type"),
        priority: definition["priority"].as_i64().unwrap_or(0),
        cell: if text("type") == "date" { Cell::Age(vec![path]) } else { Cell::Path(path) },
    }
}

fn statuses(pod: &Value) -> impl Iterator<Item = &Value> {
    items(&pod["status"], "containerStatuses")
}

fn ready_containers(pod: &Value) -> Value {
    let ready = statuses(pod).filter(|status| status["ready"] == true).count();
    format!("{ready}/{}", items(&pod["spec"], "containers").count()).into()
}

fn restarts(pod: &Value) -> Value {
    statuses(pod).filter_map(|status| status["restartCount"].as_u64()).max().unwrap_or(0).into()
}

fn pod_status(pod: &Value) -> Value {
    if !meta(pod, "deletionTimestamp").is_empty() {
        return "Terminating".into();
    }
    if let Some(reason) = pod["status"]["reason"].as_str() {
        return reason.into();
    }
    let waiting = |status: &Value| status["state"]["waiting"]["reason"].as_str().map(str::to_owned);
    match statuses(pod).find_map(waiting) {
        Some(reason) => reason.into(),
        None if !items(&pod["spec"], "schedulingGates").collect::<Vec<_>>().is_empty() => {
            "SchedulingGated".into()
        }
        None if pod["status"]["phase"] == "Succeeded" => "Completed".into(),
        None if pod["status"]["phase"] == "Failed" => "Error".into(),
        None => pod["status"]["phase"].clone(),
    }
}

fn node_status(node: &Value) -> Value {
    let ready = items(&node["status"], "conditions").find(|c| c["type"] == "Ready").map(|c| &c["status"]);
    let mut text = if ready.is_some_and(|status| status == "True") { "Ready" } else { "NotReady" }.to_owned();
    if node["spec"]["unschedulable"] == true {
        text.push_str(",SchedulingDisabled");
    }
    text.into()
}

fn data(object: &Value) -> Value {
    object["data"].as_object().map_or(0, serde_json::Map::len).into()
}

/// `35s`, `12m`, `4h`, `3d`, as kubectl shortens.
fn age(seconds: i64) -> String {
    match seconds.max(0) {
        s @ 0..120 => format!("{s}s"),
        s @ 120..7200 => format!("{}m", s / 60),
        s @ 7200..172_800 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}
