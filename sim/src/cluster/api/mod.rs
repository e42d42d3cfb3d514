//! A Kubernetes API server in memory: what kube clients, kubectl, schedulers, kubelets and controllers need of one.
//!
//! Served: discovery; list, get and watch (resource versions, bookmarks, 410, selectors, Tables, metadata alone); create, update,
//! delete, and patch in its four forms; the subresources `status`, `scale`, `binding`, `eviction`; CustomResourceDefinitions with printer
//! columns, validated by their schemas and the rules in them; mutating webhooks on CREATE. What it does not serve it says: 501 with a Status, never silence.
//!
//! Not there, and not pretended: authentication (everybody is the administrator, so it listens on loopback alone), schemas of
//! the built-in kinds, quotas, other versions of a resource than the one asked for. Deleting a namespace deletes what is in it at once.

pub mod admission;
pub mod apply;
pub mod bind;
pub mod conditions;
pub mod defaults;
pub mod discovery;
pub mod events;
pub mod fields;
pub mod jsonpath;
pub mod kinds;
pub mod merge_keys;
pub mod object;
pub mod protobuf;
pub mod remove;
pub mod request;
pub mod scale;
pub mod schema;
pub mod select;
pub mod serve;
pub mod status;
pub mod store;
pub mod strategic;
pub mod table;
pub mod watch;
pub mod write;

use std::sync::Arc;

use serde_json::{Value, json};

pub use self::defaults::{is_extended, whole};
pub use self::select::matches_labels;
pub use self::serve::{Running, ServeError};

use self::kinds::{Kind, Kinds};
use self::object::{items, meta, metadata};
use self::status::Refusal;
use self::store::{Store, Write};

/// Changes that watches can still catch up with.
const REMEMBERED: usize = 20_000;
const WEBHOOKS: &str = "admissionregistration.k8s.io/mutatingwebhookconfigurations";
const DEFINITIONS: &str = "apiextensions.k8s.io/customresourcedefinitions";

/// The server's state. [`ApiServer::serve`] puts HTTP in front of it.
#[derive(Debug)]
pub struct ApiServer {
    store: Arc<Store>,
    kinds: Kinds,
}

impl Default for ApiServer {
    fn default() -> Self {
        Self::remembering(REMEMBERED)
    }
}

impl ApiServer {
    /// A server whose watches can catch up with the last `changes` alone.
    #[must_use]
    pub fn remembering(changes: usize) -> Self {
        let server = Self { store: Arc::new(Store::new(changes)), kinds: Kinds::default() };
        for name in ["default", "kube-node-lease", "kube-public", "kube-system"] {
            server.seed_namespace(name);
        }
        server
    }

    fn seed_namespace(&self, name: &str) {
        let Some(kind) = self.kinds.find("", "v1", "namespaces") else { return };
        let now = object::timestamp(jiff::Timestamp::now());
        let metadata = json!({"name": name, "uid": object::new_uid(), "creationTimestamp": now});
        let mut namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata, "spec": {}});
        defaults::fill(&kind, &mut namespace);
        // A fresh store has no object in the way.
        let _ = self.store.change(&kind.id(), &(String::new(), name.into()), |_| Ok(Write::Put(namespace)));
    }

    fn webhooks(&self) -> Vec<Arc<Value>> {
        self.store.list(WEBHOOKS, None).0
    }

    /// Labels of the namespace that an object goes into.
    fn labels_of_namespace(&self, kind: &Kind, namespace: &str) -> Result<Option<Value>, Refusal> {
        if !kind.namespaced {
            return Ok(None);
        }
        match self.store.get("/namespaces", "", namespace) {
            Some(found) => Ok(Some(object::labels(&found).clone())),
            None => Err(Refusal::not_found("namespaces", namespace)),
        }
    }

    /// Refuses what this server could not follow later.
    fn check(&self, kind: &Kind, object: &Value) -> Result<(), Refusal> {
        match kind.kind.as_str() {
            "MutatingWebhookConfiguration" => admission::check_configuration(object),
            "CustomResourceDefinition" => {
                let (plural, group) = (&object["spec"]["names"]["plural"], &object["spec"]["group"]);
                let expected =
                    format!("{}.{}", plural.as_str().unwrap_or_default(), group.as_str().unwrap_or_default());
                if meta(object, "name") != expected {
                    let problem =
                        format!("Invalid value: must be spec.names.plural+\".\"+spec.group: {expected}");
                    return Err(Refusal::invalid(
                        &kind.kind,
                        meta(object, "name"),
                        "metadata.name",
                        &problem,
                    ));
                }
                match schema::unreadable_rules(&object["spec"]["versions"]).first() {
                    None => Ok(()),
                    Some(rule) => {
                        let field = "spec.versions.schema.x-kubernetes-validations";
                        Err(Refusal::invalid(&kind.kind, meta(object, "name"), field, rule))
                    }
                }
            }
            _ => Ok(()),
        }
    }

    /// What follows from a stored object.
    fn after_write(&self, kind: &Kind, object: &Value) {
        if kind.id().as_ref() != DEFINITIONS {
            return;
        }
        self.kinds.define(object);
        let names = object["spec"]["names"].clone();
        let key = (String::new(), meta(object, "name").to_owned());
        // Established: clients wait for it before they use the new kind.
        let _ = self.store.change(&kind.id(), &key, |live| {
            let mut after = live.map(|live| Value::clone(live)).ok_or_else(Refusal::no_such_path)?;
            let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "Accepted"});
            after["status"] = json!({
                "acceptedNames": names, "conditions": [condition("NamesAccepted"), condition("Established")],
                "storedVersions": items(&after["spec"], "versions").map(|v| v["name"].clone()).collect::<Vec<_>>(),
            });
            Ok(Write::Put(after))
        });
    }

    /// What follows from a removed object.
    fn after_delete(&self, kind: &Kind, object: &Value) {
        if kind.id().as_ref() == DEFINITIONS {
            self.kinds.undefine(object);
            let of = |key: &str| object["spec"][key].as_str().unwrap_or_default().to_owned();
            let plural = object["spec"]["names"]["plural"].as_str().unwrap_or_default();
            let id: store::ResourceId = format!("{}/{plural}", of("group")).into();
            for instance in self.store.list(&id, None).0 {
                let key = (meta(&instance, "namespace").to_owned(), meta(&instance, "name").to_owned());
                let _ = self.store.change(&id, &key, |_| Ok(Write::Remove));
            }
        }
        if kind.kind == "Namespace" {
            for (id, key) in self.store.inhabitants(meta(object, "name")) {
                let _ = self.store.change(&id, &key, |_| Ok(Write::Remove));
            }
        }
    }

    /// Takes an owner out of all objects, so that they outlive it.
    fn orphan(&self, owner: &str) {
        for (id, object) in self.store.everything() {
            if !items(&object["metadata"], "ownerReferences").any(|o| o["uid"] == owner) {
                continue;
            }
            let key = (meta(&object, "namespace").to_owned(), meta(&object, "name").to_owned());
            let _ = self.store.change(&id, &key, |live| {
                let mut after = live.map(|live| Value::clone(live)).ok_or_else(Refusal::no_such_path)?;
                if let Some(owners) =
                    metadata(&mut after).get_mut("ownerReferences").and_then(Value::as_array_mut)
                {
                    owners.retain(|o| o["uid"] != owner);
                }
                Ok(Write::Put(after))
            });
        }
    }

    /// Removes objects whose owners are all gone. Returns how many. Called by the garbage collector.
    pub(crate) fn collect_garbage(&self) -> usize {
        let everything = self.store.everything();
        let alive: std::collections::HashSet<&str> = everything.iter().map(|(_, o)| object::uid(o)).collect();
        let orphaned = |object: &Value| {
            let mut owners = items(&object["metadata"], "ownerReferences").peekable();
            owners.peek().is_some()
                && owners.all(|o| o["uid"].as_str().is_none_or(|uid| !alive.contains(uid)))
        };
        let gone: Vec<_> = everything.iter().filter(|(_, object)| orphaned(object)).collect();
        for (id, object) in &gone {
            let (plural, group) = (store::plural(id), id.split('/').next().unwrap_or_default());
            let Some(kind) = self.kinds.all().into_iter().find(|k| k.plural == plural && k.group == group)
            else {
                continue;
            };
            let target = request::Target {
                kind,
                namespace: meta(object, "namespace").into(),
                name: meta(object, "name").into(),
                subresource: String::new(),
            };
            let uid = json!({"preconditions": {"uid": object::uid(object)}});
            let already = !meta(object, "deletionTimestamp").is_empty();
            if !already
                && let Err(refusal) = remove::delete(self, &target, &request::Parameters::default(), &uid)
            {
                tracing::debug!(name = target.name, refusal = refusal.message, "garbage stays for now");
            }
        }
        gone.len()
    }
}
