//! What is served: the built-in kinds, and those that CustomResourceDefinitions add.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use serde_json::Value;

use super::events;
use super::object::items;
use super::store::ResourceId;

#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: String,
    pub version: String,
    /// `Pod`.
    pub kind: String,
    /// `pods`.
    pub plural: String,
    /// `pod`.
    pub singular: String,
    /// `po`.
    pub short: Vec<String>,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
    /// `status`, `scale`, `binding`, `eviction`.
    pub subresources: Vec<String>,
    /// Printer columns and schema, where a CustomResourceDefinition made it.
    pub custom: Option<Arc<Custom>>,
}

/// What a CustomResourceDefinition says of a version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Custom {
    /// `additionalPrinterColumns`.
    pub columns: Value,
    /// `schema.openAPIV3Schema`.
    pub schema: Value,
}

impl Kind {
    /// `group/plural`: the versions of a resource are one, and so are the Events of both groups.
    #[must_use]
    pub fn id(&self) -> ResourceId {
        let group = if events::is_view(self) { "" } else { &self.group };
        format!("{group}/{}", self.plural).into()
    }

    /// `v1`, `apps/v1`.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// `deployments.apps`, as errors name it.
    #[must_use]
    pub fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Whether a field that is null is the same as none: not where schemas have a say.
    #[must_use]
    pub fn ignores_nulls(&self) -> bool {
        self.custom.is_none() && self.group != "apiextensions.k8s.io"
    }

    #[must_use]
    pub fn has(&self, subresource: &str) -> bool {
        self.subresources.iter().any(|s| s == subresource)
    }
}

/// group, version, kind, plural, short names, namespaced, subresources.
type Row = (&'static str, &'static str, &'static str, &'static str, &'static str, bool, &'static str);

const BUILT_IN: &[Row] = &[
    ("", "v1", "ConfigMap", "configmaps", "cm", true, ""),
    ("", "v1", "Event", "events", "ev", true, ""),
    ("", "v1", "Namespace", "namespaces", "ns", false, "status"),
    ("", "v1", "Node", "nodes", "no", false, "status"),
    ("", "v1", "Pod", "pods", "po", true, "status binding eviction log"),
    ("", "v1", "Secret", "secrets", "", true, ""),
    ("", "v1", "Service", "services", "svc", true, "status"),
    ("", "v1", "ServiceAccount", "serviceaccounts", "sa", true, ""),
    ("apps", "v1", "Deployment", "deployments", "deploy", true, "status scale"),
    ("apps", "v1", "ReplicaSet", "replicasets", "rs", true, "status scale"),
    // Stored and listed, so that tools that look for workloads find them; nothing here runs them.
    ("apps", "v1", "StatefulSet", "statefulsets", "sts", true, "status scale"),
    ("apps", "v1", "DaemonSet", "daemonsets", "ds", true, "status"),
    ("batch", "v1", "Job", "jobs", "", true, "status"),
    ("batch", "v1", "CronJob", "cronjobs", "cj", true, "status"),
    ("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", "pc", false, ""),
    ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", "pdb", true, "status"),
    ("events.k8s.io", "v1", "Event", "events", "ev", true, ""),
    ("coordination.k8s.io", "v1", "Lease", "leases", "", true, ""),
    (
        "admissionregistration.k8s.io",
        "v1",
        "MutatingWebhookConfiguration",
        "mutatingwebhookconfigurations",
        "",
        false,
        "",
    ),
    (
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        "crd crds",
        false,
        "status",
    ),
];

/// What a real API server has and this one refuses by name, rather than with a bare 404.
const REFUSED: &[&str] = &[
    "admissionregistration.k8s.io/validatingwebhookconfigurations",
    "admissionregistration.k8s.io/validatingadmissionpolicies",
    "admissionregistration.k8s.io/validatingadmissionpolicybindings",
    "apps/controllerrevisions",
    "authentication.k8s.io/tokenreviews",
    "autoscaling/horizontalpodautoscalers",
    "rbac.authorization.k8s.io/clusterroles",
    "rbac.authorization.k8s.io/clusterrolebindings",
    "rbac.authorization.k8s.io/roles",
    "rbac.authorization.k8s.io/rolebindings",
    "/endpoints",
    "/persistentvolumeclaims",
    "/persistentvolumes",
    "/podtemplates",
    "/replicationcontrollers",
];

/// Of these there are none, and none can be made: a list of them is empty, as `kubectl describe namespace` asks.
const NONE: &[(&str, &str)] = &[("limitranges", "LimitRange"), ("resourcequotas", "ResourceQuota")];

/// All kinds that are served now.
#[derive(Debug)]
pub struct Kinds {
    known: RwLock<BTreeMap<(String, String, String), Arc<Kind>>>,
}

impl Default for Kinds {
    fn default() -> Self {
        let known = BUILT_IN.iter().map(built_in).map(keyed).collect();
        Self { known: RwLock::new(known) }
    }
}

fn built_in(row: &Row) -> Kind {
    let &(group, version, kind, plural, short, namespaced, subresources) = row;
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    Kind {
        group: group.into(),
        version: version.into(),
        kind: kind.into(),
        plural: plural.into(),
        singular: kind.to_lowercase(),
        short: words(short),
        namespaced,
        subresources: words(subresources),
        custom: None,
    }
}

fn keyed(kind: Kind) -> ((String, String, String), Arc<Kind>) {
    ((kind.group.clone(), kind.version.clone(), kind.plural.clone()), Arc::new(kind))
}

impl Kinds {
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        let key = (group.to_owned(), version.to_owned(), plural.to_owned());
        self.known.read().get(&key).cloned()
    }

    /// Whether a real API server has it.
    #[must_use]
    pub fn refused(group: &str, plural: &str) -> bool {
        REFUSED.contains(&format!("{group}/{plural}").as_str()) || Self::none_of(group, plural).is_some()
    }

    /// The kind of a resource of which there is never an object here.
    #[must_use]
    pub fn none_of(group: &str, plural: &str) -> Option<&'static str> {
        let found = NONE.iter().find(|(none, _)| group.is_empty() && *none == plural);
        found.map(|(_, kind)| *kind)
    }

    /// All kinds, by group, version and plural.
    pub fn all(&self) -> Vec<Arc<Kind>> {
        self.known.read().values().cloned().collect()
    }

    /// Serves what a CustomResourceDefinition defines, and nothing else of its resource.
    pub fn define(&self, definition: &Value) {
        let mut known = self.known.write();
        known.retain(|_, kind| kind.custom.is_none() || kind.qualified() != definition["metadata"]["name"]);
        known.extend(custom(definition).map(keyed));
    }

    pub fn undefine(&self, definition: &Value) {
        let name = &definition["metadata"]["name"];
        self.known.write().retain(|_, kind| kind.custom.is_none() || kind.qualified() != *name);
    }
}

fn custom(definition: &Value) -> impl Iterator<Item = Kind> {
    let spec = &definition["spec"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let names = &spec["names"];
    items(spec, "versions").filter(|version| version["served"] != false).map(move |version| Kind {
        group: text(&spec["group"]),
        version: text(&version["name"]),
        kind: text(&names["kind"]),
        plural: text(&names["plural"]),
        singular: names["singular"]
            .as_str()
            .map_or_else(|| text(&names["kind"]).to_lowercase(), str::to_owned),
        short: items(names, "shortNames").map(text).collect(),
        namespaced: spec["scope"] == "Namespaced",
        subresources: version["subresources"]["status"]
            .is_object()
            .then(|| "status".to_owned())
            .into_iter()
            .collect(),
        custom: Some(Arc::new(Custom {
            columns: version["additionalPrinterColumns"].clone(),
            schema: version["schema"]["openAPIV3Schema"].clone(),
        })),
    })
}
