//! From a GPUMigration to a policy in decided form, with every value checked. Pure.
//!
//! The CRD's own validation refuses most of this at the API server; a policy file has only us.

use gpu_migrate_model::annotation::PolicyRef;
use gpu_migrate_model::crd::{
    Convert, Direction, GPUMigration, GPUMigrationSpec, MigrationMode, MultiCard, OnUnconvertible,
};
use gpu_migrate_model::names;
use gpu_migrate_model::units::{Blocks, Cores};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use std::collections::BTreeMap;

use crate::convert::{Conversion, Override, Ratio, is_gpu};
use crate::policy::{Constant, Mode, Policies, Policy, Rollout, Scheduling, Settings};

/// A policy that is not in force, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub name: String,
    pub generation: i64,
    pub reason: PolicyError,
}

/// What is wrong with a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value}: expected {expected}")]
pub struct PolicyError {
    pub field: String,
    pub value: String,
    pub expected: &'static str,
}

impl Policies {
    /// Compiles policies. The bad ones are handed back; in force instead is what their status says was accepted last, so that all
    /// replicas agree, also after a restart.
    pub fn compile<'m>(
        migrations: impl IntoIterator<Item = &'m GPUMigration>,
        settings: &Settings,
    ) -> (Self, Vec<Rejected>) {
        let (mut policies, mut rejected) = (Vec::new(), Vec::new());
        for migration in migrations {
            match compile(migration, settings) {
                Ok(policy) => policies.push(policy),
                Err(reason) => {
                    policies.extend(accepted(migration).and_then(|former| compile(&former, settings).ok()));
                    rejected.push(Rejected {
                        name: migration.metadata.name.clone().unwrap_or_default(),
                        generation: migration.metadata.generation.unwrap_or_default(),
                        reason,
                    });
                }
            }
        }
        (Self::new(policies, settings.clone()), rejected)
    }
}

/// A policy with the spec that was accepted last.
fn accepted(migration: &GPUMigration) -> Option<GPUMigration> {
    let accepted = migration.status.as_ref()?.accepted.as_ref()?;
    let mut former = migration.clone();
    former.spec = serde_json::from_str(&accepted.spec).ok()?;
    former.metadata.generation = Some(accepted.generation);
    Some(former)
}

/// Compiles one policy.
///
/// # Errors
/// The first field that makes no sense.
pub fn compile(migration: &GPUMigration, settings: &Settings) -> Result<Policy, PolicyError> {
    let spec = &migration.clone().in_force().spec;
    let reference = PolicyRef {
        name: migration.metadata.name.clone().unwrap_or_default(),
        generation: migration.metadata.generation.unwrap_or_default(),
    };
    check(&reference, spec)?;
    let conversion = conversion(&spec.convert, settings)?;
    let recorded = migration.status.iter().flat_map(|status| &status.conversions);
    let former = recorded
        .filter_map(|one| Some((one.id.clone(), one.value().filter(|value| *value != spec.convert)?)))
        .filter_map(|(id, convert)| Some((id, self::conversion(&convert, settings).ok()?)))
        .collect::<BTreeMap<_, _>>();
    let by_product =
        |conversion: &Conversion| conversion.overrides.iter().any(|layer| layer.product.is_some());
    let narrowed = spec.r#match.as_ref();
    let selector = narrowed.and_then(|narrowed| narrowed.pod_selector.clone());
    if let Some(selector) = &selector {
        check_selector(selector)?;
    }
    Ok(Policy {
        reference_text: String::from(reference.clone()),
        reference,
        project: spec.project.clone(),
        namespaces: narrowed.map(|narrowed| narrowed.namespaces.clone()).unwrap_or_default(),
        selector,
        mode: match spec.mode {
            MigrationMode::Off => Mode::Off,
            MigrationMode::Audit => Mode::Audit,
            MigrationMode::Enforce => Mode::Enforce,
        },
        by_product: by_product(&conversion) || former.values().any(by_product),
        conversion,
        former,
        scheduling: scheduling(spec)?,
        rollout: rollout(spec),
        deny_unconvertible: spec.on_unconvertible == OnUnconvertible::Deny,
    })
}

fn bad(field: impl Into<String>, value: impl ToString, expected: &'static str) -> PolicyError {
    PolicyError { field: field.into(), value: value.to_string(), expected }
}

fn check(reference: &PolicyRef, spec: &GPUMigrationSpec) -> Result<(), PolicyError> {
    if reference.name.is_empty() {
        return Err(bad("metadata.name", "\"\"", "a name"));
    }
    if spec.project.is_empty() || spec.project.len() > 63 {
        let value = format!("{:?}", spec.project);
        return Err(bad("spec.project", value, "a label value of 1 to 63 characters"));
    }
    if spec.rollout.percent > 100 {
        return Err(bad("spec.rollout.percent", spec.rollout.percent, "0 to 100"));
    }
    Ok(())
}

fn conversion(convert: &Convert, settings: &Settings) -> Result<Conversion, PolicyError> {
    check_ratio("spec.convert", Some(convert.cores_per_card), Some(convert.blocks_per_card))?;
    let mut overrides = Vec::with_capacity(convert.overrides.len());
    for (index, layer) in convert.overrides.iter().enumerate() {
        let field = format!("spec.convert.overrides[{index}]");
        check_ratio(&field, layer.cores_per_card, layer.blocks_per_card)?;
        if layer.gpu_product.is_none() && layer.container.is_none() {
            return Err(bad(field, "no condition", "gpuProduct, container or both"));
        }
        if layer.cores_per_card.is_none() && layer.blocks_per_card.is_none() {
            return Err(bad(field, "no ratio", "coresPerCard, blocksPerCard or both"));
        }
        overrides.push(Override {
            product: layer.gpu_product.clone(),
            container: layer.container.clone(),
            cores: layer.cores_per_card.map(|cores| cores.0),
            blocks: layer.blocks_per_card.map(|blocks| blocks.0),
        });
    }
    let mut mapped = BTreeMap::new();
    for (index, mapping) in convert.resources.iter().enumerate() {
        let field = format!("spec.convert.resources[{index}]");
        if mapping.name == settings.dialect.legacy || !is_gpu(&mapping.name, &settings.dialect) {
            let expected = "nvidia.com/mig-… or a time-sliced resource such as nvidia.com/gpu.shared";
            return Err(bad(format!("{field}.name"), &mapping.name, expected));
        }
        check_ratio(&field, Some(mapping.cores), Some(mapping.blocks))?;
        mapped.insert(mapping.name.clone(), Ratio { cores: mapping.cores.0, blocks: mapping.blocks.0 });
    }
    Ok(Conversion {
        dialect: settings.dialect.clone(),
        base: Ratio { cores: convert.cores_per_card.0, blocks: convert.blocks_per_card.0 },
        overrides,
        target: convert.target,
        share_multi_card: convert.multi_card == MultiCard::Scale,
        mapped,
    })
}

fn check_ratio(field: &str, cores: Option<Cores>, blocks: Option<Blocks>) -> Result<(), PolicyError> {
    if let Some(cores) = cores.filter(|cores| *cores == Cores::ZERO || *cores > Cores::CARD) {
        return Err(bad(format!("{field}: cores"), cores.0, "1 to 100; 100 is a whole card"));
    }
    match blocks {
        Some(blocks) if blocks == Blocks::ZERO => {
            Err(bad(format!("{field}: blocks"), 0, "at least 1 block of 256 MiB"))
        }
        _ => Ok(()),
    }
}

fn check_selector(selector: &LabelSelector) -> Result<(), PolicyError> {
    for (index, expression) in selector.match_expressions.iter().flatten().enumerate() {
        let known = ["In", "NotIn", "Exists", "DoesNotExist"].contains(&expression.operator.as_str());
        let field = || format!("spec.match.podSelector.matchExpressions[{index}]");
        if !known {
            let expected = "In, NotIn, Exists or DoesNotExist";
            return Err(bad(format!("{}.operator", field()), &expression.operator, expected));
        }
        let listed = ["In", "NotIn"].contains(&expression.operator.as_str());
        if listed == expression.values.as_ref().is_none_or(Vec::is_empty) {
            let value = format!("{:?}", expression.values.as_deref().unwrap_or_default());
            let expected = "values with In and NotIn, and none with Exists and DoesNotExist";
            return Err(bad(format!("{}.values", field()), value, expected));
        }
    }
    Ok(())
}

fn scheduling(spec: &GPUMigrationSpec) -> Result<Scheduling, PolicyError> {
    let edit = &spec.scheduling;
    let mut toleration_add = Vec::with_capacity(edit.tolerations.add.len());
    for (index, toleration) in edit.tolerations.add.iter().enumerate() {
        let value = serde_json::to_value(toleration).map_err(|error| {
            bad(format!("spec.scheduling.tolerations.add[{index}]"), error, "a toleration")
        })?;
        let value = Constant::from(value);
        if !toleration_add.contains(&value) {
            toleration_add.push(value);
        }
    }
    // A key that is listed twice can be removed only once.
    let mut selector_remove = edit.node_selector.remove.clone();
    selector_remove.sort_unstable();
    selector_remove.dedup();
    let target = spec.convert.target;
    // The policy's default is the name of our own scheduler.
    let scheduler_name = match edit.scheduler_name.as_str() {
        "" => None,
        names::SCHEDULER => target.scheduler().map(str::to_owned),
        name => Some(name.to_owned()),
    };
    Ok(Scheduling {
        scheduler_name,
        replace_schedulers: edit.replace_schedulers.clone(),
        runtime_class_name: edit.runtime_class_name.clone(),
        selector_remove,
        selector_set: edit.node_selector.set.clone(),
        toleration_remove: edit.tolerations.remove_keys.clone(),
        toleration_add,
        labels_set: target.labels(),
        // Only our extender takes the gate away.
        gate_gangs: edit.gang_gate && target.is_ours(),
    })
}

fn rollout(spec: &GPUMigrationSpec) -> Rollout {
    let rollout = &spec.rollout;
    match (rollout.waves.is_empty(), rollout.direction, spec.mode) {
        // The operator sets no label in Audit mode: what would be converted is said before the waves begin.
        (false, Direction::Forward, MigrationMode::Audit) => Rollout::Percent(100),
        (false, ..) => Rollout::Labelled,
        (true, Direction::Forward, _) => Rollout::Percent(rollout.percent),
        (true, Direction::Rollback | Direction::RollbackNow, _) => Rollout::Percent(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn reason(spec: Value) -> String {
        let value = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
            "metadata": {"name": "m", "generation": 3}, "spec": spec});
        let migration: GPUMigration = serde_json::from_value(value).unwrap();
        compile(&migration, &Settings::default()).map_or_else(|e| e.to_string(), |p| p.reference_text)
    }

    #[test]
    fn a_policy_carries_name_and_generation() {
        assert_eq!(reason(json!({"project": "p"})), "m@3");
    }

    #[test]
    fn nonsense_names_field_value_and_what_was_expected() {
        let selector = |operator: &str, values: Value| {
            json!({"project": "p", "match": {"podSelector": {"matchExpressions":
                [{"key": "k", "operator": operator, "values": values}]}}})
        };
        for (spec, expected) in [
            (json!({"project": ""}), "spec.project: \"\": expected a label value"),
            (
                json!({"project": "p", "rollout": {"percent": 101}}),
                "spec.rollout.percent: 101: expected 0 to 100",
            ),
            (
                json!({"project": "p", "convert": {"coresPerCard": 0}}),
                "spec.convert: cores: 0: expected 1 to 100",
            ),
            (
                json!({"project": "p", "convert": {"coresPerCard": 200}}),
                "spec.convert: cores: 200: expected 1 to 100",
            ),
            (
                json!({"project": "p", "convert": {"blocksPerCard": 0}}),
                "spec.convert: blocks: 0: expected at least 1",
            ),
            (
                json!({"project": "p", "convert": {"overrides": [{"blocksPerCard": 4}]}}),
                "spec.convert.overrides[0]: no condition",
            ),
            (
                json!({"project": "p", "convert": {"overrides": [{"container": "c"}]}}),
                "spec.convert.overrides[0]: no ratio",
            ),
            (
                json!({"project": "p", "convert": {"resources": [{"name": "amd.com/gpu", "cores": 10, "blocks": 1}]}}),
                "spec.convert.resources[0].name: amd.com/gpu: expected nvidia.com/mig-",
            ),
            (selector("Like", json!(["a"])), "operator: Like: expected In, NotIn, Exists or DoesNotExist"),
            (selector("In", json!([])), "values: []: expected values with In"),
            (selector("Exists", json!(["a"])), "values: [\"a\"]: expected values with In"),
        ] {
            let error = reason(spec.clone());
            assert!(error.contains(expected), "{spec}: {error}");
        }
    }

    #[test]
    fn an_invalid_policy_is_in_force_as_it_was_accepted_last() {
        let migration = |percent: u32, status: Value| -> GPUMigration {
            serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
                "metadata": {"name": "m", "generation": 3}, "status": status,
                "spec": {"project": "p", "mode": "Enforce", "rollout": {"percent": percent}}}))
            .unwrap()
        };
        let accepted = |spec: &str| json!({"accepted": {"generation": 2, "spec": spec}});
        let audit = r#"{"project": "p", "mode": "Audit"}"#;
        for (name, percent, status, expected, rejected) in [
            ("valid", 50, accepted(audit), Some(("m@3", Mode::Enforce)), 0),
            ("invalid", 500, accepted(audit), Some(("m@2", Mode::Audit)), 1),
            ("never valid", 500, json!({}), None, 1),
            ("invalid as well", 500, accepted(r#"{"project": ""}"#), None, 1),
            ("not JSON", 500, accepted("{"), None, 1),
        ] {
            let (policies, bad) = Policies::compile(&[migration(percent, status)], &Settings::default());
            let found: Vec<_> =
                policies.iter().map(|policy| (policy.reference_text.as_str(), policy.mode)).collect();
            assert_eq!((found, bad.len()), (expected.into_iter().collect(), rejected), "{name}");
        }
    }

    #[test]
    fn a_command_and_the_recorded_conversions_of_the_status_are_in_force() {
        let audit = json!({"mode": "Audit"});
        let status = json!({
            "command": {"action": "Start", "at": "2026-01-01T00:00:00Z", "sets": {"mode": "Enforce"}, "replaces": audit},
            "conversions": [{"id": "1", "convert": "{\"coresPerCard\": 100, \"blocksPerCard\": 42}"},
                {"id": "2", "convert": "{\"coresPerCard\": 50, \"blocksPerCard\": 42}"}, {"id": "0", "convert": "?"}],
        });
        let migration = serde_json::from_value(
            json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
            "metadata": {"name": "m", "generation": 2}, "status": status,
            "spec": {"project": "p", "mode": "Audit", "convert": {"coresPerCard": 50, "blocksPerCard": 42}}}),
        );
        let policy = compile(&migration.unwrap(), &Settings::default()).unwrap();
        assert_eq!(policy.mode, Mode::Enforce);
        let former = policy.former.iter().map(|(id, former)| (id.as_str(), former.base.cores));
        assert_eq!((former.collect::<Vec<_>>(), policy.conversion.base.cores), (vec![("1", 100)], 50));
    }

    #[test]
    fn what_is_listed_twice_is_done_once() {
        let toleration = json!({"key": "k", "operator": "Exists"});
        let spec: GPUMigrationSpec = serde_json::from_value(json!({"project": "p", "scheduling": {
            "nodeSelector": {"remove": ["b", "a", "b"]}, "tolerations": {"add": [toleration, toleration]},
        }}))
        .unwrap();
        let edits = scheduling(&spec).unwrap();
        assert_eq!(
            (edits.selector_remove, edits.toleration_add),
            (vec!["a".into(), "b".into()], vec![toleration.into()])
        );
    }

    #[test]
    fn waves_and_the_way_back_leave_it_to_the_label() {
        let in_mode = |mode: &str, rollout: Value| {
            let spec: GPUMigrationSpec =
                serde_json::from_value(json!({"project": "p", "mode": mode, "rollout": rollout})).unwrap();
            super::rollout(&spec)
        };
        let rollout = |rollout: Value| in_mode("Enforce", rollout);
        assert_eq!(rollout(json!({})), Rollout::Percent(100));
        assert_eq!(rollout(json!({"percent": 5, "unit": "Pod"})), Rollout::Percent(5));
        assert_eq!(rollout(json!({"percent": 5, "direction": "Rollback"})), Rollout::Percent(0));
        let waves = json!({"percent": 5, "waves": [{"percent": 50}]});
        assert_eq!(rollout(waves.clone()), Rollout::Labelled);
        assert_eq!(
            in_mode("Audit", waves.clone()),
            Rollout::Percent(100),
            "an audit does not wait for waves"
        );
        let mut back = waves;
        back["direction"] = json!("Rollback");
        assert_eq!(in_mode("Audit", back), Rollout::Labelled);
    }
}
