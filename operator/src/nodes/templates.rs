//! DaemonSets and pods that the operator creates from the templates of a ConfigMap. Pure.

use super::driver::revision;
use gpu_migrate_model::crd::Isolation;
use gpu_migrate_model::names;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use thiserror::Error;

/// Name of the ConfigMap with the templates, in the operator's namespace.
pub const CONFIG_MAP: &str = "gpu-migrate-templates";
/// Label value of the installer's pods.
pub const INSTALLER: &str = "driver-installer";
/// Label of an installer's pod: which run it is.
pub const REVISION: &str = "gpu-migrate.io/revision";

/// A node component, run as a DaemonSet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The node agent, one DaemonSet for each isolation.
    Agent(Agent),
    /// NVIDIA's plugin, registered with the kubelet.
    NvidiaDirect,
    /// NVIDIA's plugin, registered with the node agent.
    NvidiaBridged,
    Dcgm,
}

/// The isolation of a node agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Agent {
    None,
    Driver,
    Vcuda,
    Mps,
    HamiCore,
}

impl From<Isolation> for Agent {
    fn from(isolation: Isolation) -> Self {
        match isolation {
            Isolation::None => Self::None,
            Isolation::Driver => Self::Driver,
            Isolation::Vcuda => Self::Vcuda,
            Isolation::Mps => Self::Mps,
            Isolation::HamiCore => Self::HamiCore,
        }
    }
}

impl Agent {
    /// As the agent's `--isolation` takes it.
    #[must_use]
    pub const fn flag_value(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Driver => "driver",
            Self::Vcuda => "vcuda",
            Self::Mps => "mps",
            Self::HamiCore => "hami-core",
        }
    }
}

impl Component {
    pub const ALL: [Self; 8] = [
        Self::Agent(Agent::None),
        Self::Agent(Agent::Driver),
        Self::Agent(Agent::Vcuda),
        Self::Agent(Agent::Mps),
        Self::Agent(Agent::HamiCore),
        Self::NvidiaDirect,
        Self::NvidiaBridged,
        Self::Dcgm,
    ];

    /// Its name; with `.yaml` the key of its template.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Agent(Agent::None) => "node-agent",
            Self::Agent(Agent::Driver) => "node-agent-driver",
            Self::Agent(Agent::Vcuda) => "node-agent-vcuda",
            Self::Agent(Agent::Mps) => "node-agent-mps",
            Self::Agent(Agent::HamiCore) => "node-agent-hami-core",
            Self::NvidiaDirect => "nvidia-plugin",
            Self::NvidiaBridged => "nvidia-plugin-bridged",
            Self::Dcgm => "dcgm-exporter",
        }
    }

    /// The node label that selects it.
    #[must_use]
    pub const fn label(self) -> (&'static str, &'static str) {
        match self {
            Self::Agent(agent) => (names::RUN_AGENT, agent.flag_value()),
            Self::NvidiaDirect => (names::RUN_NVIDIA, "Legacy"),
            Self::NvidiaBridged => (names::RUN_NVIDIA, "Bridged"),
            Self::Dcgm => (names::RUN_DCGM, "true"),
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An invalid template. What runs from an earlier version stays.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TemplateError {
    #[error("ConfigMap {CONFIG_MAP} has no key {key}; expected a {kind}")]
    Missing { key: String, kind: &'static str },
    #[error("ConfigMap {CONFIG_MAP}, key {key}: {reason}")]
    Unreadable { key: String, reason: String },
    /// A field that is not as it must be.
    #[error("ConfigMap {CONFIG_MAP}, key {key}: {field} is {found}; expected {expected}")]
    Field { key: String, field: &'static str, found: String, expected: &'static str },
}

pub type Templates = BTreeMap<String, String>;

fn object(
    templates: &Templates,
    key: &str,
    version: &'static str,
    kind: &'static str,
) -> Result<Value, TemplateError> {
    let missing = || TemplateError::Missing { key: key.to_owned(), kind };
    let text = templates.get(key).ok_or_else(missing)?;
    let value: Value = serde_saphyr::from_str(text).map_err(|error| TemplateError::Unreadable {
        key: key.to_owned(),
        reason: error.to_string().lines().next().unwrap_or_default().to_owned(),
    })?;
    let checker = Checker { key, value: &value };
    checker.text("apiVersion", "/apiVersion", version)?;
    checker.text("kind", "/kind", kind)?;
    Ok(value)
}

struct Checker<'a> {
    key: &'a str,
    value: &'a Value,
}

impl Checker<'_> {
    fn error(&self, field: &'static str, found: &Value, expected: &'static str) -> TemplateError {
        TemplateError::Field { key: self.key.to_owned(), field, found: found.to_string(), expected }
    }

    fn text(&self, field: &'static str, pointer: &str, expected: &'static str) -> Result<(), TemplateError> {
        let found = self.value.pointer(pointer).unwrap_or(&Value::Null);
        if found == expected { Ok(()) } else { Err(self.error(field, found, expected)) }
    }

    fn present(
        &self,
        field: &'static str,
        pointer: &str,
        expected: &'static str,
    ) -> Result<(), TemplateError> {
        let found = self.value.pointer(pointer).unwrap_or(&Value::Null);
        let empty = found.as_str() == Some("") || found.as_array().is_some_and(Vec::is_empty);
        if found.is_null() || empty { Err(self.error(field, found, expected)) } else { Ok(()) }
    }
}

/// Sets `value[path…]` and creates missing objects on the path.
fn set_path(value: &mut Value, path: &[&str], new: Value) {
    let mut at = value;
    for key in path {
        if !at.is_object() {
            *at = json!({});
        }
        at = &mut at[*key];
    }
    *at = new;
}

fn set_metadata(object: &mut Value, namespace: &str, component: &str) {
    set_path(object, &["metadata", "namespace"], json!(namespace));
    let labels = [
        ("app.kubernetes.io/managed-by", "gpu-migrate-operator"),
        // `gpu-migrate uninstall` selects by it.
        ("app.kubernetes.io/name", "gpu-migrate"),
        (names::COMPONENT, component),
    ];
    for (key, value) in labels {
        set_path(object, &["metadata", "labels", key], json!(value));
    }
}

/// The DaemonSet of a component for server-side apply: the template in the operator's namespace, on the nodes with the component's
/// label.
///
/// # Errors
/// [`TemplateError`].
pub fn daemon_set(
    component: Component,
    templates: &Templates,
    namespace: &str,
) -> Result<Value, TemplateError> {
    let key = format!("{component}.yaml");
    let mut set = object(templates, &key, "apps/v1", "DaemonSet")?;
    let checker = Checker { key: &key, value: &set };
    checker.present("metadata.name", "/metadata/name", "a name")?;
    checker.present(
        "spec.selector.matchLabels",
        "/spec/selector/matchLabels",
        "labels of the pod template",
    )?;
    checker.present("spec.template.spec.containers", "/spec/template/spec/containers", "containers")?;
    let wanted = set.pointer("/spec/selector/matchLabels").and_then(Value::as_object);
    let given = set.pointer("/spec/template/metadata/labels").cloned().unwrap_or_default();
    if let Some((label, value)) =
        wanted.into_iter().flatten().find(|(label, value)| given.get(*label) != Some(value))
    {
        let found = json!({label.as_str(): value});
        let expected = "labels that the pod template has";
        return Err(checker.error("spec.selector.matchLabels", &found, expected));
    }
    set_metadata(&mut set, namespace, component.name());
    let (label, value) = component.label();
    set_path(&mut set, &["spec", "template", "spec", "nodeSelector", label], json!(value));
    set_path(
        &mut set,
        &["spec", "template", "metadata", "labels", names::COMPONENT],
        json!(component.name()),
    );
    if let Some(set) = set.as_object_mut() {
        set.remove("status");
    }
    Ok(set)
}

/// The pod that installs `version` on a node, and the name of its run.
///
/// # Errors
/// [`TemplateError`].
pub fn installer(
    key: &str,
    templates: &Templates,
    version: &str,
    node: &str,
    namespace: &str,
) -> Result<(Value, String), TemplateError> {
    let mut pod = object(templates, key, "v1", "Pod")?;
    let checker = Checker { key, value: &pod };
    checker.present("spec.containers", "/spec/containers", "containers")?;
    if pod.pointer("/spec/restartPolicy").is_some_and(|policy| policy == "Always") {
        let expected = "Never or OnFailure";
        return Err(checker.error("spec.restartPolicy", &json!("Always"), expected));
    }
    let revision = revision(templates.get(key).map_or("", String::as_str), version);
    set_metadata(&mut pod, namespace, INSTALLER);
    // A pod's name may have 253 characters, a node's too.
    let short = node.chars().take(200).collect::<String>();
    let short = short.trim_end_matches(['.', '-']);
    set_path(&mut pod, &["metadata", "name"], json!(format!("gpu-migrate-driver-{short}-{revision}")));
    set_path(&mut pod, &["metadata", "labels", REVISION], json!(revision));
    // Bound directly, past taints, like a DaemonSet's pod.
    set_path(&mut pod, &["spec", "nodeName"], json!(node));
    if pod.pointer("/spec/restartPolicy").is_none() {
        set_path(&mut pod, &["spec", "restartPolicy"], json!("Never"));
    }
    let variables = [("GPU_MIGRATE_DRIVER_VERSION", version), ("GPU_MIGRATE_NODE", node)];
    for kind in ["/spec/initContainers", "/spec/containers"] {
        let containers = pod.pointer_mut(kind).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let mut env = container.get("env").and_then(Value::as_array).cloned().unwrap_or_default();
            env.extend(variables.map(|(name, value)| json!({"name": name, "value": value})));
            container["env"] = Value::Array(env);
        }
    }
    Ok((pod, revision))
}
