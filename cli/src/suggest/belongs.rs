//! Whose a container is: its project, and the policy that converts its pods. Pure.

use super::series::{Key, Series};
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_model::names;
use gpu_migrate_webhook::policy::{Policies, Selected, Settings};
use gpu_migrate_webhook::view::PodView;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::ResourceExt as _;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};

type Labels = BTreeMap<String, String>;

/// Whose a container is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Belongs {
    /// The policy is that of this name; it may not exist yet.
    To { project: String, policy: String },
    /// And why.
    Nowhere(String),
}

/// Policies, and labels of namespaces and of the pods that are still there.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    policies: Policies,
    migrations: Vec<GPUMigration>,
    namespaces: HashMap<String, Labels>,
    pods: HashMap<(String, String), Labels>,
}

impl Owners {
    /// Of a cluster.
    ///
    /// # Errors
    /// A policy that the webhook does not accept either.
    pub(crate) fn new(
        migrations: Vec<GPUMigration>,
        namespaces: &[Namespace],
        pods: &[Pod],
    ) -> Result<Self, String> {
        let (policies, rejected) = Policies::compile(migrations.iter(), &Settings::default());
        if let Some(one) = rejected.first() {
            return Err(format!("GPUMigration {}: {}", one.name, one.reason));
        }
        let of_pod =
            |pod: &Pod| ((pod.namespace().unwrap_or_default(), pod.name_any()), pod.labels().clone());
        Ok(Self {
            policies,
            migrations,
            namespaces: namespaces.iter().map(|one| (one.name_any(), one.labels().clone())).collect(),
            pods: pods.iter().map(of_pod).collect(),
        })
    }

    /// The policy of a name, as it is.
    pub(crate) fn policy(&self, name: &str) -> Option<&GPUMigration> {
        self.migrations.iter().find(|one| one.metadata.name.as_deref() == Some(name))
    }

    /// A namespace's labels.
    pub(crate) fn namespace(&self, name: &str) -> Option<&Labels> {
        self.namespaces.get(name)
    }

    /// Whose it is. Of a pod that is gone it is known what a recording says, and what its namespace says.
    pub(crate) fn of(&self, key: &Key, series: &Series) -> Belongs {
        let pod = self.pods.get(&(key.namespace.clone(), key.pod.clone()));
        let namespace = self.namespaces.get(&key.namespace);
        let label =
            |labels: Option<&'_ Labels>, key: &str| labels.and_then(|labels| labels.get(key)).cloned();
        let own = match pod {
            Some(labels) => labels.get(names::PROJECT).cloned(),
            None => series.project.clone(),
        };
        let of_namespace = label(namespace, names::PROJECT);
        let fixed = label(namespace, names::FIXED_PROJECT);
        let project = names::project_of(own.as_deref(), of_namespace.as_deref(), fixed.as_deref());
        let Some(project) = project else {
            return Belongs::Nowhere(format!(
                "in no project (label {} on the pod or its namespace)",
                names::PROJECT
            ));
        };
        self.policy_of(project, &key.namespace, pod)
    }

    fn policy_of(&self, project: &str, namespace: &str, pod: Option<&Labels>) -> Belongs {
        let narrowed = |one: &GPUMigration| {
            let narrowed = one.spec.r#match.as_ref();
            one.spec.project == project
                && narrowed.is_some_and(|narrowed| {
                    narrowed.pod_selector.is_some()
                        && (narrowed.namespaces.is_empty()
                            || narrowed.namespaces.iter().any(|name| name == namespace))
                })
        };
        if pod.is_none() && self.migrations.iter().any(narrowed) {
            return Belongs::Nowhere(format!(
                "gone, and which policy of project {project} was theirs depends on their labels (spec.match.podSelector)"
            ));
        }
        let view = json!({"metadata": {"labels": pod}, "spec": {"containers": []}}).to_string();
        let Ok(view) = serde_json::from_str::<PodView<'_>>(&view) else {
            return Belongs::Nowhere("not readable as pods".to_owned());
        };
        match self.policies.select(project, namespace, &view) {
            Selected::One(policy) => {
                Belongs::To { project: project.to_owned(), policy: policy.reference.name.clone() }
            }
            Selected::Conflict(names) => Belongs::Nowhere(format!(
                "under policies that are equally specific, so that none applies: {}",
                names.join(", ")
            )),
            Selected::None if self.policies.knows(project) => {
                Belongs::Nowhere(format!("not matched by any policy of project {project} (spec.match)"))
            }
            Selected::None => Belongs::To { project: project.to_owned(), policy: self.new_name(project) },
        }
    }

    /// A name for the policy of a project that has none; a label value is nearly one.
    fn new_name(&self, project: &str) -> String {
        let name = project.to_lowercase().replace('_', "-");
        let free = |name: &String| self.policy(name).is_none();
        let mut names =
            std::iter::once(name.clone()).chain((2_u32..).map(|number| format!("{name}-{number}")));
        names.find(free).unwrap_or(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str, project: &str, narrowed: serde_json::Value) -> GPUMigration {
        serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": name},
            "spec": {"project": project, "mode": "Enforce", "match": narrowed}}))
        .unwrap()
    }

    fn owners(migrations: Vec<GPUMigration>) -> Owners {
        let namespace = |name: &str, labels: serde_json::Value| {
            serde_json::from_value::<Namespace>(json!({"metadata": {"name": name, "labels": labels}}))
                .unwrap()
        };
        let namespaces = [
            namespace("plain", json!({})),
            namespace("danlu", json!({names::PROJECT: "danlu"})),
            namespace("fixed", json!({names::PROJECT: "danlu", names::FIXED_PROJECT: "true"})),
        ];
        let pod = |namespace: &str, name: &str, labels: serde_json::Value| {
            serde_json::from_value::<Pod>(
                json!({"metadata": {"name": name, "namespace": namespace, "labels": labels}}),
            )
            .unwrap()
        };
        let pods = [
            pod("danlu", "big", json!({"tier": "big"})),
            pod("danlu", "moved", json!({names::PROJECT: "search"})),
            pod("fixed", "own", json!({names::PROJECT: "search"})),
        ];
        Owners::new(migrations, &namespaces, &pods).unwrap()
    }

    fn whose(owners: &Owners, namespace: &str, pod: &str, recorded: Option<&str>) -> String {
        let key = Key {
            namespace: namespace.into(),
            pod: pod.into(),
            container: "main".into(),
            card: "GPU-0".into(),
        };
        let series = Series { project: recorded.map(str::to_owned), ..Series::default() };
        match owners.of(&key, &series) {
            Belongs::To { project, policy } => format!("{project}: {policy}"),
            Belongs::Nowhere(why) => why,
        }
    }

    #[test]
    fn the_project_is_the_pods_label_or_its_namespaces() {
        let owners = owners(vec![policy("d", "danlu", json!(null)), policy("search", "other", json!(null))]);
        for (namespace, pod, recorded, expected) in [
            ("danlu", "gone", None, "danlu: d"),
            ("danlu", "gone", Some("search"), "search: search-2"),
            ("danlu", "moved", Some("danlu"), "search: search-2"),
            ("fixed", "own", None, "danlu: d"),
            ("unknown", "gone", Some("Team_A"), "Team_A: team-a"),
            (
                "plain",
                "gone",
                None,
                "in no project (label gpu-migrate.io/project on the pod or its namespace)",
            ),
        ] {
            assert_eq!(whose(&owners, namespace, pod, recorded), expected, "{namespace}/{pod} {recorded:?}");
        }
    }

    #[test]
    fn the_narrowest_policy_counts_where_the_labels_are_known() {
        let selector = json!({"podSelector": {"matchLabels": {"tier": "big"}}});
        let both = owners(vec![policy("all", "danlu", json!(null)), policy("big", "danlu", selector)]);
        assert_eq!(whose(&both, "danlu", "big", None), "danlu: big");
        assert!(whose(&both, "danlu", "gone", None).contains("spec.match.podSelector"));
        let elsewhere = owners(vec![policy("other", "danlu", json!({"namespaces": ["other"]}))]);
        assert!(
            whose(&elsewhere, "danlu", "big", None).contains("not matched by any policy of project danlu")
        );
        let equal = owners(vec![policy("a", "danlu", json!(null)), policy("b", "danlu", json!(null))]);
        assert!(whose(&equal, "danlu", "big", None).ends_with("none applies: a, b"));
    }

    #[test]
    fn a_policy_that_the_webhook_refuses_is_named() {
        let mut bad = policy("bad", "danlu", json!(null));
        bad.spec.convert.cores_per_card = gpu_migrate_model::units::Cores(150);
        let error = Owners::new(vec![bad], &[], &[]).unwrap_err();
        assert!(
            error.starts_with("GPUMigration bad: spec.convert: cores: 150: expected 1 to 100"),
            "{error}"
        );
    }
}
