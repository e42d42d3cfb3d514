//! The apiserver's audit log of our programs: user, verb, object and response code of each request.
//!
//! It shows which granted verbs are used, and which operator replica wrote what. One line a
//! request, for our accounts only. With the content of some: Leases for the leader, and Bindings, annotations and GPUShadows
//! for the holders of each card over time.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::stage::SYSTEM_NAMESPACE;

pub const LOG: &str = "audit.jsonl";

/// The programs that have an account.
pub const PROGRAMS: [&str; 4] =
    ["gpu-migrate-webhook", "gpu-migrate-extender", "gpu-migrate-operator", "gpu-migrate-bridge"];

/// The user name of a program's account.
#[must_use]
pub fn account(program: &str) -> String {
    format!("system:serviceaccount:{SYSTEM_NAMESPACE}:{program}")
}

/// The audit policy. Watches never end, so the stage ResponseStarted is logged as well.
pub(crate) fn policy() -> Value {
    let users: Vec<String> = PROGRAMS.iter().map(|program| account(program)).collect();
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": true,
        "rules": [
            {"level": "Request", "users": users, "resources": [
                {"group": "coordination.k8s.io", "resources": ["leases"]},
                {"group": "", "resources": ["pods", "pods/binding"]},
                {"group": "gpu-migrate.io", "resources": ["gpushadows/status"]},
            ]},
            {"level": "Metadata", "users": users},
            {"level": "None"},
        ],
    })
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: String,
    user: User,
    object_ref: Option<Object>,
    response_status: Option<Answer>,
    request_object: Option<Value>,
    pub request_received_timestamp: Timestamp,
    pub stage_timestamp: Timestamp,
}

#[derive(Clone, Debug, Deserialize)]
struct User {
    username: String,
    #[serde(default)]
    groups: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Object {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Answer {
    code: Option<u16>,
}

impl Entry {
    /// Whether a program's account sent it.
    #[must_use]
    pub fn is_of(&self, program: &str) -> bool {
        self.user.username == account(program)
    }

    /// Whether the user is in this group: replicas of a program differ by it.
    #[must_use]
    pub fn in_group(&self, group: &str) -> bool {
        self.user.groups.contains(group)
    }

    /// Group and resource, with a subresource behind a slash, as RBAC names them.
    #[must_use]
    pub fn resource(&self) -> Option<(String, String)> {
        let object = self.object_ref.as_ref()?;
        let resource = match object.subresource.as_str() {
            "" => object.resource.clone(),
            sub => format!("{}/{sub}", object.resource),
        };
        Some((object.api_group.clone(), resource))
    }

    /// `namespace/name` of what was asked for; either may be empty.
    #[must_use]
    pub fn object(&self) -> Option<String> {
        self.object_ref.as_ref().map(|object| format!("{}/{}", object.namespace, object.name))
    }

    /// Whether it was allowed: any code but 401 and 403.
    #[must_use]
    pub fn allowed(&self) -> bool {
        !matches!(self.code(), Some(401 | 403))
    }

    /// Whether it created an object: a server-side apply, which is a patch, needs the verb create for that.
    #[must_use]
    pub fn created(&self) -> bool {
        self.code() == Some(201)
    }

    #[must_use]
    pub fn done(&self) -> bool {
        self.code().is_some_and(|code| code < 300)
    }

    fn code(&self) -> Option<u16> {
        self.response_status.as_ref()?.code
    }

    /// The leader by this write of a Lease; `Some("")` if it was released. `None` for any other request.
    #[must_use]
    pub fn leader(&self) -> Option<&str> {
        let write = ["create", "update", "patch"].contains(&self.verb.as_str()) && self.done();
        if !write || self.resource()?.1 != "leases" {
            return None;
        }
        // A renewal names no holder: it stays.
        Some(self.request_object.as_ref()?.pointer("/spec/holderIdentity")?.as_str().unwrap_or_default())
    }
}

/// All requests so far, in the order of the responses.
pub fn read(logs: &Path) -> Result<Vec<Entry>> {
    let path = logs.join(LOG);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // A line without an end is still being written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("not an audit event: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_event_of_the_apiserver_is_parsed() {
        let lease = |verb: &str, code: u16| -> Entry {
            serde_json::from_value(json!({
                "kind": "Event", "level": "Request", "stage": "ResponseComplete", "verb": verb,
                "user": {"username": account("gpu-migrate-operator"), "groups": ["one", "system:authenticated"]},
                "objectRef": {"resource": "leases", "namespace": "n", "name": "l", "apiGroup": "coordination.k8s.io"},
                "responseStatus": {"metadata": {}, "code": code},
                "requestObject": {"spec": {"holderIdentity": "one"}},
                "requestReceivedTimestamp": "2026-11-21T12:00:00.000001Z", "stageTimestamp": "2026-11-21T12:00:00.000002Z",
            }))
            .unwrap()
        };
        let event = lease("patch", 200);
        assert!(event.is_of("gpu-migrate-operator") && !event.is_of("gpu-migrate-bridge"));
        assert!(event.in_group("one") && event.allowed());
        assert_eq!(event.resource().unwrap(), ("coordination.k8s.io".to_owned(), "leases".to_owned()));
        assert_eq!((event.object().as_deref(), event.leader()), (Some("n/l"), Some("one")));
        assert_eq!(lease("get", 200).leader(), None);
        assert_eq!(lease("patch", 409).leader(), None, "another replica was faster");
        assert!(!lease("patch", 403).allowed());
    }
}
