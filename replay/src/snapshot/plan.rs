//! Which conversion is tried: the policies of a file, or one ratio for every pod.

use std::collections::BTreeMap;

use gpu_migrate_model::crd::{Convert, GPUMigration, GPUMigrationSpec, MigrationMode, Override, Rollout};
use gpu_migrate_model::names;
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_webhook::compile::Rejected;
use gpu_migrate_webhook::policy::{Policies, Settings};
use gpu_migrate_webhook::policy_file::PolicyFile;

use super::read::Snapshot;

/// Name of the project that every pod belongs to when one ratio is tried for all.
const EVERYONE: &str = "everyone";

#[derive(Debug)]
pub struct Plan {
    /// `50 cores`, or `policies`.
    pub label: String,
    pub policies: Policies,
    /// Labels of namespaces; those of `everywhere` come first.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// Labels that every namespace is taken to have. The pods' own project is then not looked at.
    pub everywhere: Option<BTreeMap<String, String>>,
}

impl Plan {
    /// The policies of a file, in full force: enforced, and rolled out to everyone.
    ///
    /// # Errors
    /// Policies that the webhook would not accept.
    pub fn of_file(file: PolicyFile, snapshot: &Snapshot) -> Result<Self, Vec<Rejected>> {
        let mut namespaces = snapshot.namespaces.clone();
        namespaces.extend(file.namespaces);
        let in_force = file.migrations.into_iter().map(|mut migration| {
            migration.spec.mode = MigrationMode::Enforce;
            migration.spec.rollout = Rollout::default();
            migration
        });
        Self::compile("policies".to_owned(), in_force.collect(), namespaces, None)
    }

    /// One ratio for every pod. Without `blocks`, a card's part of its memory: of the smallest card for pods that do not say which
    /// product they request.
    ///
    /// # Errors
    /// A ratio that the webhook would not accept.
    pub fn of_ratio(
        cores: Cores,
        blocks: Option<Blocks>,
        snapshot: &Snapshot,
    ) -> Result<Self, Vec<Rejected>> {
        let part = |mib: u64| Blocks((Blocks::in_mib(mib).0.saturating_mul(cores.0) / Cores::CARD.0).max(1));
        let known = || snapshot.nodes.iter().filter_map(|node| Some((&node.product, node.card_memory_mib?)));
        let smallest = known().map(|(_, mib)| mib).min().map_or(Blocks(1), part);
        let mut of_product: BTreeMap<&String, u64> = BTreeMap::new();
        for (product, mib) in known().filter(|(product, _)| !product.is_empty()) {
            of_product.entry(product).and_modify(|least| *least = mib.min(*least)).or_insert(mib);
        }
        let overrides = of_product.into_iter().filter(|_| blocks.is_none()).map(|(product, mib)| Override {
            gpu_product: Some(product.clone()),
            blocks_per_card: Some(part(mib)),
            ..Override::default()
        });
        let convert = Convert {
            cores_per_card: cores,
            blocks_per_card: blocks.unwrap_or(smallest),
            overrides: overrides.collect(),
            ..Convert::default()
        };
        let spec = GPUMigrationSpec {
            project: EVERYONE.to_owned(),
            mode: MigrationMode::Enforce,
            convert,
            ..GPUMigrationSpec::default()
        };
        let everywhere = BTreeMap::from([
            (names::OPT_IN.to_owned(), "true".to_owned()),
            (names::PROJECT.to_owned(), EVERYONE.to_owned()),
        ]);
        let migration = GPUMigration::new(EVERYONE, spec);
        Self::compile(cores.to_string(), vec![migration], BTreeMap::new(), Some(everywhere))
    }

    fn compile(
        label: String,
        migrations: Vec<GPUMigration>,
        namespaces: BTreeMap<String, BTreeMap<String, String>>,
        everywhere: Option<BTreeMap<String, String>>,
    ) -> Result<Self, Vec<Rejected>> {
        let (policies, rejected) = Policies::compile(migrations.iter(), &Settings::default());
        if rejected.is_empty() { Ok(Self { label, policies, namespaces, everywhere }) } else { Err(rejected) }
    }
}
