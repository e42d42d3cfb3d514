//! `gpu-migrate quota translate`: limits on shares that correspond to limits on whole cards.

use super::change::{MANAGER, confirmed, dry};
use super::{ObjectOutput, Snapshot, columns, warn};
use crate::args::TranslateArgs;
use crate::exit::Exit;
use crate::style::{self, HEAD, counted, paint};
use anyhow::Context as _;
use gpu_migrate_model::crd::{GPUMigration, MigrationMode, specificity};
use gpu_migrate_model::names::{Dialect, OPT_IN, PROJECT};
use gpu_migrate_model::quantity::Quantity;
use gpu_migrate_model::target::Target;
use gpu_migrate_model::units::{Blocks, Cores};
use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translation {
    pub namespace: String,
    pub name: String,
    pub cards: u64,
    pub policy: String,
    /// Resources and the most of them that the cards become.
    pub limits: BTreeMap<String, u64>,
    /// It already has limits for shares: these.
    pub present: bool,
}

/// Why a quota has no counterpart.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// Not a whole number of cards.
    #[error("ResourceQuota {namespace}/{name}: spec.hard[{key}]: {value}: expected a whole number of cards")]
    NotWhole {
        namespace: String,
        name: String,
        /// `requests.nvidia.com/gpu`.
        key: String,
        value: String,
    },
    /// Nobody says what a card is worth.
    #[error(
        "ResourceQuota {namespace}/{name}: no policy (GPUMigration) for project {project}: no conversion ratio is defined"
    )]
    NoPolicy { namespace: String, name: String, project: String },
    /// Shares that are an annotation.
    #[error(
        "ResourceQuota {namespace}/{name}: shares of {target} are no resources, so that no ResourceQuota limits them: limit its queue"
    )]
    NoResource { namespace: String, name: String, target: Target },
}

fn key(resource: &str) -> String {
    // Extended resources can only be limited by their requests (pkg/apis/core/validation, ValidateResourceQuotaSpec).
    format!("requests.{resource}")
}

/// Limits on shares for all quotas on whole cards in opted-in namespaces.
#[must_use]
pub fn translate(snapshot: &Snapshot, namespace: Option<&str>) -> Vec<Result<Translation, QuotaError>> {
    let opted_in = snapshot
        .namespaces
        .iter()
        .filter(|namespace| namespace.labels().get(OPT_IN).is_some_and(|value| value == "true"))
        .map(|namespace| (namespace.name_any(), namespace.labels().get(PROJECT).cloned().unwrap_or_default()))
        .collect::<BTreeMap<_, _>>();
    snapshot
        .quotas
        .iter()
        .filter(|quota| namespace.is_none_or(|name| quota.namespace().as_deref() == Some(name)))
        .filter_map(|quota| {
            let project = opted_in.get(&quota.namespace()?)?;
            one(quota, project, &snapshot.migrations).transpose()
        })
        .collect()
}

fn one(
    quota: &ResourceQuota,
    project: &str,
    migrations: &[GPUMigration],
) -> Result<Option<Translation>, QuotaError> {
    let dialect = Dialect::default();
    let (namespace, name) = (quota.namespace().unwrap_or_default(), quota.name_any());
    let hard = quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default();
    let Some(value) = hard.get(&key(&dialect.legacy)) else { return Ok(None) };
    let cards =
        value.0.parse::<Quantity>().ok().and_then(Quantity::whole).ok_or_else(|| QuotaError::NotWhole {
            namespace: namespace.clone(),
            name: name.clone(),
            key: key(&dialect.legacy),
            value: value.0.clone(),
        })?;
    let Some((policy, most)) = largest(migrations, project, &namespace) else {
        return Err(QuotaError::NoPolicy { namespace, name, project: project.to_owned() });
    };
    let mut limits = BTreeMap::new();
    for (target, (cores, blocks)) in most {
        let quota = target.quota(cards, Cores(cores), Blocks(blocks));
        if quota.is_empty() {
            return Err(QuotaError::NoResource { namespace, name, target });
        }
        limits.extend(quota.into_iter().map(|(resource, most)| (resource.to_owned(), most)));
    }
    let present = limits.keys().all(|resource| hard.contains_key(&key(resource)));
    Ok(Some(Translation { namespace, name, cards, policy, limits, present }))
}

/// The policies in force in a namespace, and the most that one of them makes of a card, overrides and whole cards for containers of
/// several included: a limit must not refuse what a policy converts to. Those that select pods of the namespace by label
/// count beside the one for all its pods, which is the narrowest of those. By the target that they convert to.
fn largest(migrations: &[GPUMigration], project: &str, namespace: &str) -> Option<(String, Ratios)> {
    let here = migrations.iter().filter(|one| {
        let names = one.spec.r#match.as_ref().map_or(&[][..], |narrow| &narrow.namespaces);
        one.spec.project == project && (names.is_empty() || names.iter().any(|name| name == namespace))
    });
    let by_label = |one: &&GPUMigration| {
        one.spec.r#match.as_ref().and_then(|narrow| narrow.pod_selector.as_ref()).is_some()
    };
    let (some, mut all) = here.partition::<Vec<_>, _>(by_label);
    // As the webhook chooses: the narrowest, and of equals one that is not off.
    all.sort_by_key(|one| {
        let names = one.spec.r#match.as_ref().map_or(&[][..], |narrow| &narrow.namespaces);
        std::cmp::Reverse((specificity(names, None), one.spec.mode != MigrationMode::Off))
    });
    let in_force = all.into_iter().take(1).chain(some).collect::<Vec<_>>();
    let mut most = Ratios::new();
    for convert in in_force.iter().map(|one| &one.spec.convert) {
        let base = (convert.cores_per_card, convert.blocks_per_card);
        let of_target = most.entry(convert.target).or_default();
        let layers = convert.overrides.iter().map(|layer| (layer.cores_per_card, layer.blocks_per_card));
        for (cores, blocks) in layers.chain([(None, None)]) {
            of_target.0 = of_target.0.max(cores.unwrap_or(base.0).0);
            of_target.1 = of_target.1.max(blocks.unwrap_or(base.1).0);
        }
    }
    let names = in_force.iter().map(|one| one.name_any()).collect::<Vec<_>>().join(", ");
    (!most.is_empty()).then_some((names, most))
}

/// Most cores and most blocks that a card becomes, by target.
type Ratios = BTreeMap<Target, (u32, u32)>;

impl Translation {
    /// The added limits for `kubectl apply --server-side`. The limit on whole cards stays: during the migration a project has both
    /// kinds of pods.
    #[must_use]
    pub fn manifest(&self) -> Value {
        let limits = self.limits.iter().map(|(resource, most)| (key(resource), most.to_string()));
        json!({
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"namespace": self.namespace, "name": self.name},
            "spec": {"hard": limits.collect::<BTreeMap<_, _>>()},
        })
    }

    /// `400 cores and 168 blocks (42.0 GiB)` of ours, and the resources of another target.
    fn shown(&self) -> String {
        let dialect = Dialect::default();
        let each = self.limits.iter().map(|(resource, most)| match resource {
            name if *name == dialect.cores => format!("{most} cores"),
            name if *name == dialect.memory => {
                style::blocks(Blocks(u32::try_from(*most).unwrap_or(u32::MAX)))
            }
            name => format!("{name}: {most}"),
        });
        each.collect::<Vec<_>>().join(" and ")
    }
}

pub(crate) async fn command(
    args: &TranslateArgs,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let snapshot = args.cluster.snapshot().await?;
    let mut exit = Exit::Done;
    let (mut rows, mut items) = (Vec::new(), Vec::new());
    let translations = translate(&snapshot, args.namespace.as_deref());
    if translations.is_empty() {
        let place = args
            .namespace
            .as_ref()
            .map_or_else(|| "an opted-in namespace".into(), |name| format!("namespace {name}"));
        warn(err, &format!("no ResourceQuota in {place} limits {}", key(&Dialect::default().legacy)))?;
    }
    let valid = translations.iter().filter(|translation| translation.is_ok()).count();
    let question = format!("add limits on shares to {}?", counted(valid, "ResourceQuota"));
    if args.apply && valid > 0 && !confirmed(args.change, out, &question)? {
        return Ok(Exit::No);
    }
    for translation in translations {
        let translation = match translation {
            Ok(translation) => translation,
            Err(error) => {
                warn(err, &error.to_string())?;
                exit = Exit::No;
                continue;
            }
        };
        let Translation { namespace, name, cards, policy, .. } = &translation;
        if args.apply {
            let quotas = Api::<ResourceQuota>::namespaced(args.cluster.reach.client().await?, namespace);
            // Not forced: limits on shares set by others stay.
            let params = PatchParams { dry_run: args.change.dry_run, ..PatchParams::apply(MANAGER) };
            let patched = quotas.patch(name, &params, &Patch::Apply(translation.manifest())).await;
            patched.with_context(|| format!("ResourceQuota {namespace}/{name}"))?;
        }
        rows.push(
            [namespace, name, &cards.to_string(), &translation.shown(), policy].map(String::clone).to_vec(),
        );
        items.push(translation.manifest());
        if args.output == ObjectOutput::Name {
            writeln!(out, "resourcequota/{name}")?;
        }
        if args.output != ObjectOutput::Yaml {
            continue;
        }
        if args.apply {
            writeln!(
                out,
                "resourcequota/{name} in {namespace}: {} are {} by policy {policy}{}",
                counted(*cards as usize, "card"),
                translation.shown(),
                dry(args.change)
            )?;
        } else {
            writeln!(out, "---\n# {} by policy {policy}", counted(*cards as usize, "card"))?;
            out.write_all(crate::plan::diff::to_yaml(&translation.manifest()).as_bytes())?;
        }
    }
    match args.output {
        ObjectOutput::Table => {
            let titles = ["NAMESPACE", "QUOTA", "CARDS", "SHARES", "POLICY"];
            if !args.no_headers {
                rows.insert(0, titles.map(|title| paint(HEAD, title)).to_vec());
            }
            out.write_all(columns(&rows).as_bytes())?;
        }
        ObjectOutput::Json => {
            writeln!(out, "{:#}", json!({"apiVersion": "v1", "kind": "List", "items": items}))?;
        }
        ObjectOutput::Yaml | ObjectOutput::Name => {}
    }
    Ok(exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str, spec: Value) -> GPUMigration {
        GPUMigration::new(name, serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_quota_follows_the_policies_in_force_in_its_namespace_and_their_overrides() {
        let wide = policy(
            "wide",
            json!({"project": "p", "mode": "Enforce", "convert": {"coresPerCard": 25, "blocksPerCard": 10}}),
        );
        let narrow = policy(
            "narrow",
            json!({"project": "p", "mode": "Enforce", "match": {"namespaces": ["a"]},
            "convert": {"coresPerCard": 50, "blocksPerCard": 20, "overrides": [{"container": "big", "blocksPerCard": 40}]}}),
        );
        let labelled = policy(
            "labelled",
            json!({"project": "p", "mode": "Enforce", "match": {"podSelector": {"matchLabels": {"x": "y"}}},
            "convert": {"coresPerCard": 60, "blocksPerCard": 5}}),
        );
        let other = policy("other", json!({"project": "q", "mode": "Enforce"}));
        let of = |policies: &[&GPUMigration], namespace: &str| {
            let policies = policies.iter().map(|one| (*one).clone()).collect::<Vec<_>>();
            let (names, most) = largest(&policies, "p", namespace)?;
            Some((names, most[&Target::GpuManager]))
        };
        assert_eq!(of(&[&wide, &narrow, &other], "b"), Some(("wide".into(), (25, 10))));
        assert_eq!(of(&[&wide, &narrow, &other], "a"), Some(("narrow".into(), (50, 40))));
        assert_eq!(of(&[&wide, &narrow, &labelled], "a"), Some(("narrow, labelled".into(), (60, 40))));
        assert_eq!(of(&[&other], "a"), None);
    }

    #[test]
    fn a_quota_is_translated_into_the_targets_words() {
        let quota: ResourceQuota =
            serde_json::from_value(json!({"metadata": {"namespace": "a", "name": "q"},
            "spec": {"hard": {"requests.nvidia.com/gpu": "4"}}}))
            .unwrap();
        let limits = |target: &str| {
            let convert = json!({"target": target, "coresPerCard": 33, "blocksPerCard": 10});
            let policy = policy("p", json!({"project": "p", "mode": "Enforce", "convert": convert}));
            one(&quota, "p", &[policy])
                .map(|translation| translation.unwrap().manifest()["spec"]["hard"].clone())
        };
        assert_eq!(
            limits("gpu-manager").unwrap(),
            json!({"requests.tencent.com/vcuda-core": "132", "requests.tencent.com/vcuda-memory": "40"})
        );
        assert_eq!(
            limits("hami").unwrap(),
            json!({"requests.nvidia.com/gpucores": "132", "requests.nvidia.com/gpumem": "10240"})
        );
        assert_eq!(
            limits("volcano").unwrap(),
            json!({"requests.volcano.sh/vgpu-number": "4", "requests.volcano.sh/vgpu-cores": "132",
                "requests.volcano.sh/vgpu-memory": "10240"})
        );
        assert!(limits("kai").unwrap_err().to_string().contains("shares of KAI are no resources"));
    }
}
