//! From what was seen to ratios of policies. Pure.
//!
//! A container name of a policy gets one ratio, so it is that of the pod that uses most: p50, p95 and peak are the greatest of all pods and
//! cards that were seen. What is not certain is not proposed, and the reason is said.

use super::belongs::{Belongs, Owners};
use super::series::{Key, Seen, Series};
use gpu_migrate_model::crd::{GPUMigration, GPUMigrationSpec, MigrationMode, Override};
use gpu_migrate_model::text::counted;
use gpu_migrate_model::units::{BYTES_PER_BLOCK, Blocks, Cores};
use gpu_migrate_webhook::compile::compile;
use gpu_migrate_webhook::policy::Settings;
use jiff::{SignedDuration, Timestamp};
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};

/// Cores are proposed in steps of it: shares of a card then add up to a card.
const STEP: u32 = 5;
/// Part of the samples from which on a share counts as held back.
const OFTEN: f64 = 0.05;

/// How much is left above what was used, and how much must have been seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Percent added to the cores' p95.
    pub(crate) cores_margin: u32,
    /// Percent added to the greatest memory.
    pub(crate) memory_margin: u32,
    pub(crate) min_samples: u64,
    pub(crate) min_span: SignedDuration,
}

/// What was seen of the containers of one name under one policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Evidence {
    pub(crate) pods: usize,
    pub(crate) samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) to: Option<Timestamp>,
    /// Percent of a card.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "tenths")]
    pub(crate) p50: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "tenths")]
    pub(crate) p95: Option<f64>,
    /// Most memory of a card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
    /// Percent of a share's samples in which it kept nearly all of its cores busy.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "tenths")]
    pub(crate) at_limit_percent: Option<f64>,
    /// Models of the cards that this is of.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) models: BTreeSet<String>,
    /// Memory of the smallest of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) card_bytes: Option<u64>,
}

/// Enough digits for a person; the machine's noise is not evidence.
#[allow(clippy::ref_option, clippy::trivially_copy_pass_by_ref)] // serde's signature
fn tenths<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(|value| (value * 10.0).round() / 10.0).serialize(serializer)
}

impl Evidence {
    pub(crate) fn span(&self) -> SignedDuration {
        self.from.zip(self.to).map(|(from, to)| to.duration_since(from)).unwrap_or_default()
    }

    fn add(&mut self, series: &Series) {
        let most = |old: Option<f64>, new: Option<f64>| match (old, new) {
            (Some(old), Some(new)) => Some(old.max(new)),
            (old, new) => old.or(new),
        };
        self.samples += series.samples;
        self.from = [self.from, series.first].into_iter().flatten().min();
        self.to = self.to.max(series.last);
        self.p50 = most(self.p50, series.p50);
        self.p95 = most(self.p95, series.p95);
        self.peak_bytes = self.peak_bytes.max(series.peak_bytes);
        self.at_limit_percent = most(self.at_limit_percent, series.at_limit.map(|part| part * 100.0));
        self.models.extend(Some(series.model.clone()).filter(|model| !model.is_empty()));
        self.card_bytes = [self.card_bytes, series.card_bytes].into_iter().flatten().min();
    }
}

/// What one card is converted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Ratio {
    pub(crate) cores: Cores,
    pub(crate) blocks: Blocks,
}

/// The containers of one name under one policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Suggestion {
    pub(crate) project: String,
    /// Name of the GPUMigration.
    pub(crate) policy: String,
    pub(crate) container: String,
    pub(crate) namespaces: BTreeSet<String>,
    pub(crate) evidence: Evidence,
    /// By the policy; where there is none, by what a policy has without a ratio.
    pub(crate) now: Ratio,
    /// `None` where nothing can be proposed.
    pub(crate) proposed: Option<Ratio>,
    /// Why nothing is proposed, or not less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
}

/// A policy as it is and as it could be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Proposal {
    /// `None` for a project without a policy.
    pub(crate) before: Option<GPUMigration>,
    pub(crate) after: GPUMigration,
}

/// Everything that is said.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Suggestions {
    pub(crate) containers: Vec<Suggestion>,
    /// Every policy that a container is under, changed or not.
    pub(crate) policies: Vec<Proposal>,
    /// What is under no policy, by the reason.
    pub(crate) left_out: BTreeMap<String, BTreeSet<String>>,
}

/// What was seen of one container name under one policy.
#[derive(Debug, Default)]
struct Group {
    namespaces: BTreeSet<String>,
    pods: BTreeSet<(String, String)>,
    evidence: Evidence,
    /// A pod whose container has several cards at once, and how many.
    several: Option<(String, u32)>,
    /// A pod that has a part of a card.
    part: Option<String>,
    /// Most cores that a share that is often at its limit has.
    held_back: Option<u32>,
}

impl Group {
    fn add(&mut self, key: &Key, series: &Series) {
        let pod = format!("{}/{}", key.namespace, key.pod);
        self.namespaces.insert(key.namespace.clone());
        self.pods.insert((key.namespace.clone(), key.pod.clone()));
        self.evidence.pods = self.pods.len();
        self.evidence.add(series);
        if series.cards > 1 {
            self.several.get_or_insert((pod.clone(), series.cards));
        }
        if series.cores_requested.is_none() {
            self.part.get_or_insert(pod);
        }
        if series.at_limit.is_some_and(|part| part >= OFTEN) {
            self.held_back = self.held_back.max(series.cores_requested);
        }
    }
}

/// Decides about everything that was seen.
///
/// # Errors
/// A policy that the webhook does not accept either.
pub(crate) fn propose(seen: &Seen, owners: &Owners, limits: &Limits) -> Result<Suggestions, String> {
    let mut all = Suggestions::default();
    let mut groups: BTreeMap<(String, String), BTreeMap<String, Group>> = BTreeMap::new();
    for (key, series) in seen {
        let (project, policy) = match owners.of(key, series) {
            Belongs::To { project, policy } => (project, policy),
            Belongs::Nowhere(why) => {
                all.left_out.entry(why).or_default().insert(format!("{}/{}", key.namespace, key.pod));
                continue;
            }
        };
        let group = groups.entry((project, policy)).or_default().entry(key.container.clone()).or_default();
        group.add(key, series);
    }
    for ((project, name), containers) in groups {
        let before = owners.policy(&name).cloned();
        let mut after = before.clone().unwrap_or_else(|| new_policy(&name, &project));
        for (container, group) in containers {
            let now = ratio(&after, &container)?;
            let (proposed, why) = decide(&group, now, &after, &container, limits);
            if let Some(proposed) = proposed.filter(|proposed| !is_same(now, *proposed)) {
                write(&mut after, &container, proposed);
            }
            all.containers.push(Suggestion {
                project: project.clone(),
                policy: name.clone(),
                container,
                namespaces: group.namespaces,
                evidence: group.evidence,
                now,
                proposed,
                why,
            });
        }
        all.policies.push(Proposal { before, after });
    }
    Ok(all)
}

/// For a project that has none. It converts nothing yet.
fn new_policy(name: &str, project: &str) -> GPUMigration {
    let spec = GPUMigrationSpec {
        project: project.to_owned(),
        mode: MigrationMode::Audit,
        ..GPUMigrationSpec::default()
    };
    GPUMigration::new(name, spec)
}

/// What the policy gives a container of one card, whatever the card's product.
fn ratio(policy: &GPUMigration, container: &str) -> Result<Ratio, String> {
    let name = policy.metadata.name.as_deref().unwrap_or_default();
    let compiled =
        compile(policy, &Settings::default()).map_err(|why| format!("GPUMigration {name}: {why}"))?;
    let ratio = compiled.conversion.ratio(container, None);
    Ok(Ratio { cores: Cores(ratio.cores), blocks: Blocks(ratio.blocks) })
}

/// A whole card has all of its memory.
pub(crate) fn is_same(now: Ratio, proposed: Ratio) -> bool {
    now == proposed || (now.cores == Cores::CARD && proposed.cores == Cores::CARD)
}

/// The ratio, or why there is none; beside a ratio, why it is not less.
fn decide(
    group: &Group,
    now: Ratio,
    policy: &GPUMigration,
    container: &str,
    limits: &Limits,
) -> (Option<Ratio>, Option<String>) {
    let nothing = |why: String| (None, Some(why));
    let evidence = &group.evidence;
    if let Some((pod, cards)) = &group.several {
        return nothing(format!(
            "pod {pod} has {cards} cards: a ratio is for containers of one card, and would change the memory of these too"
        ));
    }
    if let Some(pod) = &group.part {
        return nothing(format!(
            "pod {pod} has a part of a card, made by NVIDIA's plugin: its ratio is in spec.convert.resources"
        ));
    }
    let index = policy
        .spec
        .convert
        .overrides
        .iter()
        .position(|layer| layer.gpu_product.is_some() && layer.container.as_deref() == Some(container));
    if let Some(index) = index {
        return nothing(format!(
            "GPUMigration {} has a ratio of its own for it by card product (spec.convert.overrides[{index}]): measure and change that one by hand",
            policy.metadata.name.as_deref().unwrap_or_default()
        ));
    }
    let (Some(p95), Some(peak)) = (evidence.p95, evidence.peak_bytes) else {
        let missing = if evidence.peak_bytes.is_none() { "memory" } else { "cores" };
        return nothing(format!(
            "which {missing} it uses is not known: the node agents report it only where they see processes (bridge.hostPID), and not of MIG devices"
        ));
    };
    let span = evidence.span();
    if evidence.samples < limits.min_samples || span < limits.min_span {
        return nothing(format!(
            "{} over {} is too little: expected at least {} over {} (--min-samples, --min-span)",
            counted(usize::try_from(evidence.samples).unwrap_or(usize::MAX), "sample"),
            show(span),
            limits.min_samples,
            show(limits.min_span)
        ));
    }
    if peak == 0 {
        return nothing(
            "it used no memory of its card: either it had no work, or it needs no card".to_owned(),
        );
    }
    let blocks = blocks(peak, limits.memory_margin);
    let of_card = evidence.card_bytes.map(|bytes| Blocks::in_mib(bytes >> 20));
    if let Some(of_card) = of_card.filter(|of_card| blocks > *of_card) {
        let why = "its memory with the margin is more than a card has, so it keeps a whole one".to_owned();
        return (Some(Ratio { cores: Cores::CARD, blocks: of_card.max(Blocks(1)) }), Some(why));
    }
    let mut cores = cores(p95, limits.cores_margin);
    let mut why = None;
    if let Some(has) = group.held_back.map(Cores) {
        cores = cores.max(has.min(Cores::CARD));
        why = Some(format!(
            "a share of {} cores was often at its limit: what it would use with more is not known",
            has.0
        ));
    }
    let proposed = Ratio { cores, blocks };
    (Some(if is_same(now, proposed) { now } else { proposed }), why)
}

/// A p95 in percent of a card, with the margin, in whole steps: at least one, at most a card.
fn cores(p95: f64, margin: u32) -> Cores {
    // Less than a millionth is the machine's rounding.
    let wanted = (p95 * f64::from(100 + margin) / 100.0 - 1e-6).ceil().max(1.0);
    Cores((wanted as u32).next_multiple_of(STEP).min(Cores::CARD.0))
}

/// The greatest memory with the margin, in whole blocks: at least one.
fn blocks(peak_bytes: u64, margin: u32) -> Blocks {
    let wanted = u128::from(peak_bytes) * u128::from(100 + margin);
    let blocks = wanted.div_ceil(100 * u128::from(BYTES_PER_BLOCK));
    Blocks(u32::try_from(blocks).unwrap_or(u32::MAX).max(1))
}

/// Writes the ratio of a container into the policy: in the one entry that has it already, else in an entry behind all others, which wins.
fn write(policy: &mut GPUMigration, container: &str, ratio: Ratio) {
    let overrides = &mut policy.spec.convert.overrides;
    let entry = Override {
        container: Some(container.to_owned()),
        cores_per_card: Some(ratio.cores),
        blocks_per_card: Some(ratio.blocks),
        ..Override::default()
    };
    let own = |layer: &Override| layer.gpu_product.is_none() && layer.container.as_deref() == Some(container);
    // One for all containers of a card product would win over what stands before it.
    let wins = |at: usize| overrides.iter().skip(at + 1).all(|later| later.container.is_some());
    match overrides.iter().rposition(own).filter(|at| wins(*at)) {
        Some(at) => overrides[at] = entry,
        None => {
            overrides.retain(|layer| !own(layer));
            overrides.push(entry);
        }
    }
}

/// `7 d`, `1 d 3 h`, `5 min`: the two greatest units.
pub(crate) fn show(span: SignedDuration) -> String {
    let minutes = span.as_secs().max(0) / 60;
    let units = [(minutes / 1440, "d"), (minutes / 60 % 24, "h"), (minutes % 60, "min")];
    let parts = units.into_iter().skip_while(|(count, _)| *count == 0).take(2);
    let parts = parts.filter(|(count, _)| *count > 0).map(|(count, unit)| format!("{count} {unit}"));
    let text = parts.collect::<Vec<_>>().join(" ");
    if text.is_empty() { "0 min".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Namespace;
    use serde_json::{Value, json};

    const GIB: u64 = 1 << 30;
    const LIMITS: Limits = Limits {
        cores_margin: 20,
        memory_margin: 20,
        min_samples: 100,
        min_span: SignedDuration::from_hours(24),
    };

    /// Two days of a container `main` that has a card of 48 GiB.
    fn series(p95: f64, peak_bytes: u64) -> Series {
        Series {
            samples: 2880,
            first: Timestamp::from_second(1_800_000_000).ok(),
            last: Timestamp::from_second(1_800_172_800).ok(),
            p50: Some(p95 / 2.0),
            p95: Some(p95),
            peak_bytes: Some(peak_bytes),
            cores_requested: Some(100),
            cards: 1,
            model: "L40S".into(),
            card_bytes: Some(48 * GIB),
            ..Series::default()
        }
    }

    fn key(pod: &str, container: &str) -> Key {
        Key { namespace: "danlu".into(), pod: pod.into(), container: container.into(), card: "GPU-0".into() }
    }

    fn owners(convert: Option<Value>) -> Owners {
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "danlu", "labels":
            {"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "danlu"}}}))
        .unwrap();
        let policy = convert.map(|convert| {
            serde_json::from_value(json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration",
                "metadata": {"name": "policy"}, "spec": {"project": "danlu", "mode": "Enforce", "convert": convert}}))
            .unwrap()
        });
        Owners::new(policy.into_iter().collect(), &[namespace], &[]).unwrap()
    }

    fn one(series: Series, convert: Value) -> Suggestion {
        let seen = [(key("a", "main"), series)].into();
        let mut all = propose(&seen, &owners(Some(convert)), &LIMITS).unwrap();
        all.containers.remove(0)
    }

    fn numbers(ratio: Option<Ratio>) -> Option<(u32, u32)> {
        ratio.map(|ratio| (ratio.cores.0, ratio.blocks.0))
    }

    #[test]
    fn cores_are_of_the_p95_and_memory_of_the_peak_with_their_margins() {
        for (p95, peak, expected) in [
            // 30 + 20 % = 36, in steps of 5: 40. 6 GiB + 20 % = 7.2 GiB = 28.8 blocks.
            (30.0, 6 * GIB, (40, 29)),
            // 25 + 20 % is 30, and that is a step. 5 GiB + 20 % is 6 GiB: 24 blocks.
            (25.0, 5 * GIB, (30, 24)),
            (25.1, 5 * GIB + 1, (35, 25)),
            // It is never nothing.
            (0.0, 1, (5, 1)),
            // 84 + 20 % is more than a card.
            (84.0, 10 * GIB, (100, 48)),
            // As Prometheus has it.
            (0.29 * 100.0, 10 * GIB, (35, 48)),
        ] {
            let proposed = one(series(p95, peak), json!({"coresPerCard": 50, "blocksPerCard": 42})).proposed;
            assert_eq!(numbers(proposed), Some(expected), "p95 {p95}, peak {peak}");
        }
    }

    #[test]
    fn without_a_margin_it_is_what_was_used_and_not_less() {
        let limits = Limits { cores_margin: 0, memory_margin: 0, ..LIMITS };
        let seen = [(key("a", "main"), series(40.0, 6 * GIB))].into();
        let all = propose(&seen, &owners(None), &limits).unwrap();
        assert_eq!(numbers(all.containers[0].proposed), Some((40, 24)));
    }

    /// For any use and any margin: the memory is enough, the cores are, and both can be written into a policy.
    #[test]
    fn what_is_proposed_is_enough_and_can_be_expressed() {
        for step in 0..2000_u64 {
            let (p95, margin) = ((step % 101) as f64, (step % 7 * 10) as u32);
            let peak = step * step * 7919 % (48 * GIB) + 1;
            let limits = Limits { cores_margin: margin, memory_margin: margin, ..LIMITS };
            let seen = [(key("a", "main"), series(p95, peak))].into();
            let owners = owners(Some(json!({"coresPerCard": 50, "blocksPerCard": 20})));
            let all = propose(&seen, &owners, &limits).unwrap();
            let proposed = all.containers[0].proposed.unwrap();
            assert!(f64::from(proposed.cores.0) >= p95 && proposed.cores <= Cores::CARD, "{proposed:?}");
            let whole = proposed.cores == Cores::CARD;
            let memory = u64::from(proposed.blocks.0) * BYTES_PER_BLOCK;
            assert!(whole || memory * 100 >= peak * u64::from(100 + margin), "{peak}: {proposed:?}");
            assert!(memory <= 48 * GIB, "{proposed:?}");
            let after = &all.policies[0].after;
            assert_eq!(ratio(after, "main").unwrap(), proposed);
            assert_eq!(ratio(after, "other"), ratio(all.policies[0].before.as_ref().unwrap(), "other"));
        }
    }

    #[test]
    fn what_is_not_certain_is_not_proposed_and_the_reason_is_said() {
        let base = || series(30.0, 6 * GIB);
        let hour = Timestamp::from_second(1_800_003_600).ok();
        for (series, expected) in [
            (
                Series { samples: 99, ..base() },
                "99 samples over 2 d is too little: expected at least 100 over 1 d (--min-samples, --min-span)",
            ),
            (Series { last: hour, ..base() }, "2880 samples over 1 h is too little"),
            (Series { cards: 2, ..base() }, "pod danlu/a has 2 cards"),
            (Series { cores_requested: None, ..base() }, "pod danlu/a has a part of a card"),
            (Series { p95: None, ..base() }, "which cores it uses is not known"),
            (Series { peak_bytes: None, samples: 0, ..base() }, "which memory it uses is not known"),
            (Series { peak_bytes: Some(0), ..base() }, "it used no memory of its card"),
        ] {
            let one = one(series, json!({}));
            assert_eq!(one.proposed, None, "{expected}");
            assert!(one.why.as_ref().unwrap().starts_with(expected), "{expected}: {:?}", one.why);
        }
        let by_product = json!({"overrides": [{"gpuProduct": "T4", "coresPerCard": 80}, {"gpuProduct": "T4", "container": "main", "coresPerCard": 90}]});
        let one = one(base(), by_product);
        assert!(one.proposed.is_none() && one.why.unwrap().contains("(spec.convert.overrides[1])"));
    }

    #[test]
    fn it_is_the_pod_that_uses_most_that_counts() {
        let idle = Series { p50: Some(1.0), ..series(2.0, GIB) };
        let busy = Series { samples: 200, ..series(60.0, 2 * GIB) };
        let full = Series { samples: 120, ..series(5.0, 9 * GIB) };
        let seen = [(key("a", "main"), idle), (key("b", "main"), busy), (key("c", "main"), full)].into();
        let all = propose(&seen, &owners(Some(json!({}))), &LIMITS).unwrap();
        let one = &all.containers[0];
        // 60 + 20 % = 72; 9 GiB + 20 % = 10.8 GiB = 43.2 blocks.
        assert_eq!(numbers(one.proposed), Some((75, 44)));
        assert_eq!((one.evidence.pods, one.evidence.samples, one.evidence.p50), (3, 3200, Some(30.0)));
    }

    #[test]
    fn a_share_that_is_often_at_its_limit_is_not_given_less() {
        let limits = Limits { cores_margin: 0, ..LIMITS };
        let share = |at_limit: f64| Series {
            at_limit: Some(at_limit),
            cores_requested: Some(50),
            ..series(45.0, GIB)
        };
        let of = |at_limit: f64| {
            let seen = [(key("a", "main"), share(at_limit))].into();
            propose(&seen, &owners(Some(json!({"coresPerCard": 50}))), &limits).unwrap().containers.remove(0)
        };
        let (often, seldom) = (of(0.06), of(0.04));
        assert_eq!((numbers(often.proposed), numbers(seldom.proposed)), (Some((50, 5)), Some((45, 5))));
        assert!(
            often.why.unwrap().starts_with("a share of 50 cores was often at its limit")
                && seldom.why.is_none()
        );
    }

    #[test]
    fn who_needs_nearly_all_memory_of_a_card_keeps_a_whole_one() {
        let one = one(series(10.0, 41 * GIB), json!({"coresPerCard": 50, "blocksPerCard": 100}));
        assert_eq!(numbers(one.proposed), Some((100, 192)));
        assert!(one.why.unwrap().contains("keeps a whole one"));
    }

    #[test]
    fn the_ratio_is_written_where_it_wins_and_nothing_else_changes() {
        let product = json!({"gpuProduct": "T4", "blocksPerCard": 60});
        let ours = |cores: u32, blocks: u32| json!({"container": "main", "coresPerCard": cores, "blocksPerCard": blocks});
        let side = json!({"container": "side", "coresPerCard": 10});
        for (before, after) in [
            (json!([]), json!([ours(40, 29)])),
            (json!([product]), json!([product, ours(40, 29)])),
            (json!([ours(80, 10), side]), json!([ours(40, 29), side])),
            (json!([ours(80, 10), product]), json!([product, ours(40, 29)])),
            (json!([ours(80, 10), ours(70, 11)]), json!([ours(80, 10), ours(40, 29)])),
            (json!([ours(40, 29), product]), json!([ours(40, 29), product])),
        ] {
            let seen = [(key("a", "main"), series(30.0, 6 * GIB))].into();
            let all = propose(&seen, &owners(Some(json!({"overrides": before}))), &LIMITS).unwrap();
            let written = json!(all.policies[0].after.spec.convert.overrides);
            assert_eq!(written, after, "{before}");
        }
    }

    #[test]
    fn a_project_without_a_policy_gets_one_that_converts_nothing_yet() {
        let seen = [
            (key("a", "main"), series(30.0, 6 * GIB)),
            (key("a", "full"), series(90.0, 6 * GIB)),
            (Key { namespace: "plain".into(), ..key("b", "main") }, series(30.0, GIB)),
        ]
        .into();
        let all = propose(&seen, &owners(None), &LIMITS).unwrap();
        let Proposal { before, after } = &all.policies[0];
        assert_eq!((before, after.metadata.name.as_deref()), (&None, Some("danlu")));
        assert_eq!(after.spec.mode, MigrationMode::Audit);
        assert_eq!(
            json!(after.spec.convert.overrides),
            json!([{"container": "main", "coresPerCard": 40, "blocksPerCard": 29}]),
            "a whole card needs no entry"
        );
        let left_out: Vec<_> = all.left_out.into_iter().collect();
        assert!(
            left_out[0].0.starts_with("in no project") && left_out[0].1.contains("plain/b"),
            "{left_out:?}"
        );
    }

    #[test]
    fn spans_are_shown_by_their_two_greatest_units() {
        for (minutes, expected) in [
            (0, "0 min"),
            (59, "59 min"),
            (60, "1 h"),
            (61, "1 h 1 min"),
            (1440, "1 d"),
            (1441, "1 d"),
            (1500, "1 d 1 h"),
            (10_080, "7 d"),
        ] {
            assert_eq!(show(SignedDuration::from_mins(minutes)), expected);
        }
    }
}
