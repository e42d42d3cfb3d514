//! A pod as admission sees it: the common view, with the fields that patches edit as raw text.

use gpu_migrate_model::view;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// A pod, or the pod template of a workload.
pub type PodView<'a> = view::PodView<'a, &'a RawValue>;
pub type ContainerView<'a> = view::ContainerView<'a, &'a RawValue>;

/// The ephemeral containers of a pod, as a review of `pods/ephemeralcontainers` has them.
#[derive(Debug, Deserialize)]
pub struct EphemeralView<'a> {
    #[serde(borrow = "'a")]
    spec: EphemeralSpec<'a>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct EphemeralSpec<'a> {
    #[serde(borrow = "'a")]
    ephemeral_containers: Option<Vec<ContainerView<'a>>>,
}

impl<'a> EphemeralView<'a> {
    pub(crate) fn containers(&self) -> impl Iterator<Item = &ContainerView<'a>> {
        self.spec.ephemeral_containers.iter().flatten()
    }
}

/// What a container's `env` says about one variable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnvEntries {
    /// Whether there is a list to add to.
    pub has_list: bool,
    /// The entries that set the variable, with their indexes.
    pub entries: Vec<(usize, Value)>,
}

impl EnvEntries {
    /// The entries of `container` that set `variable`.
    #[must_use]
    pub fn of(container: &ContainerView<'_>, variable: &str) -> Self {
        let Some(text) = container.env.map(RawValue::get) else { return Self::default() };
        // An escape could hide the name from the search.
        let named = text.contains(variable) || text.contains('\\');
        // What is no list is no pod either; saying "there is a list" keeps it from being overwritten.
        let entries: Vec<Value> =
            if named { serde_json::from_str(text).unwrap_or_default() } else { Vec::new() };
        let ours = |entry: &Value| entry.get("name").and_then(Value::as_str) == Some(variable);
        let entries = entries.into_iter().enumerate().filter(|(_, entry)| ours(entry)).collect();
        Self { has_list: true, entries }
    }
}

/// Whether a ConfigMap or Secret could set `variable` in a container. What it sets comes after the environment of a device plugin,
/// as all of a pod's own environment does (`kubelet_pods.go`, `GenerateRunContainerOptions`).
pub(crate) fn env_from_may_set(container: &ContainerView<'_>, variable: &str) -> bool {
    #[derive(Deserialize)]
    struct From {
        #[serde(default)]
        prefix: Option<String>,
    }
    let sources = container.env_from.map(RawValue::get).unwrap_or("[]");
    // What does not parse is no pod: the API server refuses it.
    let sources: Vec<From> = serde_json::from_str(sources).unwrap_or_default();
    sources.iter().any(|from| variable.starts_with(from.prefix.as_deref().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_escaped_variable_name_is_found() {
        let text = r#"{"name":"c","env":[{"name":"A","value":"1"},{"name":"NVIDIA\u005fVISIBLE_DEVICES","value":"all"}]}"#;
        let container: ContainerView<'_> = serde_json::from_str(text).unwrap();
        let found = EnvEntries::of(&container, "NVIDIA_VISIBLE_DEVICES");
        assert!(found.has_list && found.entries.len() == 1 && found.entries[0].0 == 1, "{found:?}");
    }
}
