//! The RBAC of `deploy/`, compared with the requests of the programs while all scenarios ran.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gpu_migrate_cluster_tests::{Cluster, audit, manifests};
use serde_json::Value;

/// Program, API group, resource with subresource, verb.
type Right = (String, String, String, String);

/// Every verb of every rule was used, by the account that has it. Runs last, and only with all the others before it.
pub(crate) async fn every_granted_verb_is_used(cluster: &mut Cluster) -> Result<()> {
    let granted = granted(&manifests::objects("base")?)?;
    let used: BTreeSet<Right> = audit::read(&cluster.setup.layout.logs())?
        .iter()
        .filter(|entry| entry.allowed())
        .filter_map(|entry| {
            let program = audit::PROGRAMS.iter().find(|program| entry.is_of(program))?;
            let (group, resource) = entry.resource()?;
            let right =
                |verb: &str| ((*program).to_owned(), group.clone(), resource.clone(), verb.to_owned());
            // An apply that creates the object needs both.
            let create = entry.created().then(|| right("create"));
            Some(create.into_iter().chain([right(&entry.verb)]))
        })
        .flatten()
        .collect();
    ensure!(granted.len() > 30, "only {} rights were found in deploy/base", granted.len());
    let unused: Vec<&Right> = granted.difference(&used).collect();
    eprintln!("    {} of {} rights were used", granted.len() - unused.len(), granted.len());
    ensure!(unused.is_empty(), "granted and never used: {unused:#?}");
    Ok(())
}

/// The rights of our own roles that are bound; the scheduler is also bound to Kubernetes' own.
fn granted(objects: &[Value]) -> Result<BTreeSet<Right>> {
    let strings = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let bound = |role: &Value| {
        objects
            .iter()
            .any(|o| o["roleRef"]["kind"] == role["kind"] && o["roleRef"]["name"] == role["metadata"]["name"])
    };
    let mut all = BTreeSet::new();
    for role in
        objects.iter().filter(|o| ["ClusterRole", "Role"].iter().any(|kind| o["kind"] == *kind) && bound(o))
    {
        let name = role["metadata"]["name"].as_str().context("a role without a name")?;
        for rule in role["rules"].as_array().context("a role without rules")? {
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    for verb in strings(&rule["verbs"]) {
                        all.insert((name.to_owned(), group.clone(), resource.clone(), verb));
                    }
                }
            }
        }
    }
    Ok(all)
}
