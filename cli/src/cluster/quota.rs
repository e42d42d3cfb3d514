//! `gpu-migrate quota translate`: limits on shares that correspond to limits on whole cards.

use super::change::MANAGER;
use super::{Output, Snapshot, columns, warn};
use crate::args::TranslateArgs;
use crate::exit::Exit;
use crate::style::{HEAD, paint};
use gpu_migrate_model::crd::GPUMigration;
use gpu_migrate_model::names::{Dialect, OPT_IN, PROJECT};
use gpu_migrate_model::quantity::Quantity;
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
    pub cores: u64,
    pub blocks: u64,
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
    let Some(policy) = migrations.iter().find(|migration| migration.spec.project == project) else {
        return Err(QuotaError::NoPolicy { namespace, name, project: project.to_owned() });
    };
    Ok(Some(Translation {
        namespace,
        name,
        cards,
        policy: policy.name_any(),
        cores: cards.saturating_mul(policy.spec.convert.cores_per_card.0.into()),
        blocks: cards.saturating_mul(policy.spec.convert.blocks_per_card.0.into()),
        present: hard.contains_key(&key(&dialect.cores)) && hard.contains_key(&key(&dialect.memory)),
    }))
}

impl Translation {
    /// The added limits for `kubectl apply --server-side`. The limit on whole cards stays: during the migration a project has both
    /// kinds of pods.
    #[must_use]
    pub fn manifest(&self) -> Value {
        let dialect = Dialect::default();
        json!({
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"namespace": self.namespace, "name": self.name},
            "spec": {"hard": {
                key(&dialect.cores): self.cores.to_string(),
                key(&dialect.memory): self.blocks.to_string(),
            }},
        })
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
    for translation in translate(&snapshot, args.namespace.as_deref()) {
        let translation = match translation {
            Ok(translation) => translation,
            Err(error) => {
                warn(err, &error.to_string())?;
                exit = Exit::No;
                continue;
            }
        };
        let Translation { namespace, name, cards, policy, cores, blocks, .. } = &translation;
        if args.apply {
            let quotas = Api::<ResourceQuota>::namespaced(args.cluster.client().await?, namespace);
            // Not forced: limits on shares set by others stay.
            quotas.patch(name, &PatchParams::apply(MANAGER), &Patch::Apply(translation.manifest())).await?;
        }
        rows.push(
            [namespace, name, &cards.to_string(), &cores.to_string(), &blocks.to_string(), policy]
                .map(String::clone)
                .to_vec(),
        );
        items.push(translation.manifest());
        if args.output != Output::Yaml {
            continue;
        }
        if args.apply {
            writeln!(
                out,
                "resourcequota/{name} in {namespace}: {cards} cards are {cores} cores and {blocks} blocks by policy {policy}"
            )?;
        } else {
            writeln!(out, "---\n# {cards} cards by policy {policy}")?;
            out.write_all(crate::plan::diff::to_yaml(&translation.manifest()).as_bytes())?;
        }
    }
    match args.output {
        Output::Table => {
            let titles = ["NAMESPACE", "QUOTA", "CARDS", "CORES", "BLOCKS", "POLICY"];
            rows.insert(0, titles.map(|title| paint(HEAD, title)).to_vec());
            out.write_all(columns(&rows).as_bytes())?;
        }
        Output::Json => writeln!(out, "{:#}", json!({"apiVersion": "v1", "kind": "List", "items": items}))?,
        Output::Yaml => {}
    }
    Ok(exit)
}
