//! `gpu-migrate preflight`: checks before a migration. Pure.
//!
//! Every finding has a remedy. One no-go makes the result a no-go.

mod dra;
mod nodes;
mod schedulers;

use super::snapshot::has_cards;
use super::{Answer, Snapshot, quota, verify};
use crate::exit::Exit;
use crate::manifest::{Manifest, Origin, Source};
use crate::plan::decide::{Rules, decide};
use crate::plan::{Fallback, Outcome, systems};
use crate::style::{ADDED, FAINT, REMOVED, WARNING, counted, paint};
use gpu_migrate_model::annotation::is_of_choice;
use gpu_migrate_model::ask::PodAsk;
use gpu_migrate_model::crd::{GPUShadow, GPUShadowStatus};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{self, Dialect};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Lowest minor version of Kubernetes: admission policies in CEL are stable from there on.
const LOWEST_MINOR: u32 = 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Good,
    /// Not looked at.
    Skipped,
    Warn,
    NoGo,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub check: &'static str,
    pub level: Level,
    pub found: String,
    /// What to do; empty where nothing is to be done.
    pub remedy: String,
}

#[must_use]
pub fn findings(snapshot: &Snapshot) -> Vec<Finding> {
    type Check = fn(&Snapshot, &mut Report);
    let checks: [(&'static str, Check); 15] = [
        ("versions", versions),
        ("runtime", nodes::runtime),
        ("kubelets", nodes::kubelets),
        ("feature gates", nodes::gates),
        ("webhook", webhook),
        ("other mutators", other_mutators),
        ("node agents", node_agents),
        ("NVIDIA plugin", nvidia_plugin),
        ("other plugins", other_plugins),
        ("DRA", dra::drivers),
        ("schedulers", schedulers::extenders),
        ("quotas", quotas),
        ("pods", pods),
        ("other systems", other_systems),
        ("invariants", invariants),
    ];
    let mut all = Vec::new();
    for (check, run) in checks {
        let mut report = Report { check, findings: Vec::new() };
        run(snapshot, &mut report);
        all.extend(report.findings);
    }
    all
}

pub(super) struct Report {
    pub(super) check: &'static str,
    pub(super) findings: Vec<Finding>,
}

impl Report {
    pub(super) fn add(&mut self, level: Level, found: String, remedy: &str) {
        self.findings.push(Finding { check: self.check, level, found, remedy: remedy.to_owned() });
    }

    /// What was not looked at is no good news.
    fn skipped(&mut self, found: String) {
        if self.findings.is_empty() {
            self.add(Level::Skipped, found, "");
        }
    }

    pub(super) fn good(&mut self, found: String) {
        if self.findings.is_empty() {
            self.add(Level::Good, found, "");
        }
    }
}

fn plugin_mode(node: &Node) -> &str {
    node.labels().get(names::PLUGIN).map_or("", String::as_str)
}

fn is_bridged(node: &&Node) -> bool {
    matches!(plugin_mode(node), "Bridged" | "Shared")
}

/// `v1.33.4` → 33.
fn minor(version: &str) -> Option<u32> {
    version.trim_start_matches('v').split('.').nth(1)?.parse().ok()
}

fn versions(snapshot: &Snapshot, report: &mut Report) {
    let mut seen = BTreeSet::new();
    for node in snapshot.nodes.iter().filter(|node| has_cards(node)) {
        let Some(info) = node.status.as_ref().and_then(|status| status.node_info.as_ref()) else { continue };
        seen.insert(info.kubelet_version.clone());
        if minor(&info.kubelet_version).is_some_and(|minor| minor < LOWEST_MINOR) {
            let found = format!("node {}: kubelet {}", node.name_any(), info.kubelet_version);
            report.add(Level::NoGo, found, "Upgrade to 1.30 or newer: older kubelets are not tested");
        }
    }
    let count = snapshot.nodes.iter().filter(|node| has_cards(node)).count();
    if count == 0 {
        report.add(
            Level::Warn,
            "no node has cards".into(),
            "Fine for a cluster that scales from zero; else see the NVIDIA plugin",
        );
    }
    report.good(format!(
        "{} with cards, kubelets {}",
        counted(count, "node"),
        seen.into_iter().collect::<Vec<_>>().join(", ")
    ));
}

pub(super) fn webhook(snapshot: &Snapshot, report: &mut Report) {
    let ours = snapshot.mutating.iter().find(|configuration| configuration.name_any() == "gpu-migrate");
    let Some(webhooks) = ours.and_then(|configuration| configuration.webhooks.as_ref()) else {
        let remedy = "Install the webhook (deploy/README.md); it registers itself once it is ready";
        return report.add(
            Level::NoGo,
            "MutatingWebhookConfiguration gpu-migrate does not exist".into(),
            remedy,
        );
    };
    for webhook in webhooks {
        if webhook.client_config.ca_bundle.as_ref().is_none_or(|bundle| bundle.0.is_empty()) {
            let found = format!("{}: no caBundle, so the API server cannot trust it", webhook.name);
            report.add(
                Level::NoGo,
                found,
                "Check the webhook's log; cert-manager's injector is the alternative",
            );
        }
        if webhook.failure_policy.as_deref() != Some("Ignore") {
            let found = format!(
                "{}: failurePolicy {}",
                webhook.name,
                webhook.failure_policy.as_deref().unwrap_or("Fail")
            );
            report.add(
                Level::NoGo,
                found,
                "Set it to Ignore: otherwise no pod of an opted-in namespace starts while the webhook is unavailable",
            );
        }
        let opt_in = webhook.namespace_selector.as_ref().and_then(|selector| selector.match_labels.as_ref());
        if opt_in.is_none_or(|labels| labels.get(names::OPT_IN).map(String::as_str) != Some("true")) {
            let found = format!("{}: namespaceSelector does not require {}", webhook.name, names::OPT_IN);
            report.add(
                Level::NoGo,
                found,
                "Restart the webhook with --register to re-create the configuration",
            );
        }
    }
    report.good("registered, with a CA and failurePolicy Ignore".into());
}

fn other_mutators(snapshot: &Snapshot, report: &mut Report) {
    let touches_pods = |rules: &k8s_openapi::api::admissionregistration::v1::RuleWithOperations| {
        rules.resources.iter().flatten().any(|resource| resource == "pods" || resource.starts_with('*'))
    };
    for configuration in
        snapshot.mutating.iter().filter(|configuration| configuration.name_any() != "gpu-migrate")
    {
        for webhook in configuration.webhooks.iter().flatten() {
            if webhook.rules.iter().flatten().any(touches_pods) {
                let found = format!("{} also changes pods", webhook.name);
                let hami = webhook.name.contains("hami.io");
                let (level, remedy) = if hami {
                    (Level::NoGo, "Keep HAMi off the namespaces that opt in: it rewrites nvidia.com/gpu too")
                } else {
                    (
                        Level::Warn,
                        "It is called again after gpu-migrate (reinvocationPolicy); make sure that it does not change resources, schedulerName and tolerations",
                    )
                };
                report.add(level, found, remedy);
            }
        }
    }
    if snapshot.mutating.is_empty() && !snapshot.settings_requested {
        return report.skipped("the files contain no MutatingWebhookConfiguration".to_owned());
    }
    report.good("no other webhook changes pods".into());
}

pub(super) fn node_agents(snapshot: &Snapshot, report: &mut Report) {
    let bridged = snapshot.nodes.iter().filter(is_bridged).collect::<Vec<_>>();
    for node in &bridged {
        let name = node.name_any();
        match snapshot.shadows.iter().find(|shadow| shadow.name_any() == name && has_agent(shadow)) {
            // The operator also writes GPUShadows of nodes without an agent.
            None => report.add(
                Level::NoGo,
                format!("node {name} is labelled {}={} and reports no cards", names::PLUGIN, plugin_mode(node)),
                "Check the node agent there: kubectl -n gpu-migrate-system get pods -o wide -l app.kubernetes.io/component=bridge",
            ),
            Some(shadow) => agent_conditions(shadow, report),
        }
    }
    if bridged.is_empty() {
        let found = format!("no node is labelled {}=Bridged", names::PLUGIN);
        report.add(
            Level::Warn,
            found,
            "Converted pods stay pending until one is: label the first node, see the runbook",
        );
    }
    report.good(format!("bridged nodes that report their cards: {}", bridged.len()));
}

/// Whether a node agent has written it.
fn has_agent(shadow: &GPUShadow) -> bool {
    let status = shadow.status.iter();
    let mut conditions = status.clone().flat_map(|status| &status.conditions);
    status.clone().any(|status| !status.cards.is_empty())
        || conditions.any(|condition| condition.type_ == "Ready")
}

fn agent_conditions(shadow: &GPUShadow, report: &mut Report) {
    for condition in shadow.status.iter().flat_map(|status| &status.conditions) {
        let bad = (condition.type_ == "Ready" && condition.status != "True")
            || (["Drift", "PluginConflict"].contains(&condition.type_.as_str())
                && condition.status == "True")
            || (condition.type_ == "DriverInstalled" && condition.reason == "Failed");
        let unlimited = condition.type_ == "IsolationReady" && condition.status == "False";
        if bad || unlimited {
            let found = format!(
                "node {}: {}={}: {}",
                shadow.name_any(),
                condition.type_,
                condition.status,
                condition.message
            );
            let remedy = if unlimited {
                "Give the node what its isolation needs, or its pool another isolation (docs/isolation.md)"
            } else {
                "Resolve this first: the ledger of the node is not reliable while it lasts"
            };
            report.add(Level::NoGo, found, remedy);
        }
    }
}

fn images(set: &DaemonSet) -> impl Iterator<Item = &str> {
    let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    pod.into_iter().flat_map(|pod| &pod.containers).filter_map(|container| container.image.as_deref())
}

/// Major and minor version by an image's tag, such as `v0.16.2-ubi8`.
fn version(image: &str) -> Option<(u32, u32)> {
    let mut numbers = image.rsplit_once(':')?.1.trim_start_matches('v').split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Device plugins are recognised by image, not by name.
fn runs(set: &DaemonSet, parts: &[&str]) -> bool {
    images(set).any(|image| parts.iter().any(|part| image.contains(part)))
}

fn nvidia_plugin(snapshot: &Snapshot, report: &mut Report) {
    let sets =
        snapshot.daemon_sets.iter().filter(|set| runs(set, &["k8s-device-plugin"])).collect::<Vec<_>>();
    let bridged =
        snapshot.nodes.iter().filter(|node| plugin_mode(node) == "Bridged").map(kube::ResourceExt::name_any);
    let of_node = |name: &str| snapshot.shadows.iter().find(|shadow| shadow.name_any() == name);
    // One without an agent is named elsewhere.
    let served = bridged.filter_map(|name| of_node(&name)).filter(|shadow| has_agent(shadow));
    let (behind, direct) = served.partition::<Vec<_>, _>(|shadow| {
        shadow.status.as_ref().is_some_and(GPUShadowStatus::has_nvidia_plugin)
    });
    if !direct.is_empty() && !sets.is_empty() {
        let names = direct.iter().map(|shadow| shadow.name_any()).collect::<Vec<_>>();
        let found = format!("NVIDIA's plugin is not behind the node agent on {}", names.join(", "));
        report.add(Level::NoGo, found, "See whether it runs there and what the node agent logs (deploy/nvidia/README.md): otherwise it allocates cards that shares are on");
    }
    for (set, image) in sets.iter().flat_map(|set| images(set).map(move |image| (set, image))) {
        if image.contains("k8s-device-plugin") && version(image).is_some_and(|version| version < (0, 17)) {
            let found = format!(
                "DaemonSet {}/{} runs {image}, which is older than v0.17.0",
                set.namespace().unwrap_or_default(),
                set.name_any()
            );
            report.add(
                Level::NoGo,
                found,
                "Update it: older versions know no other socket than the kubelet's, and were not tried",
            );
        }
    }
    if sets.is_empty() {
        report.add(
            Level::Warn,
            "no DaemonSet runs NVIDIA's device plugin".into(),
            "Legacy pods need it; GPU operator users find it in the operator's namespace",
        );
    }
    report.good(format!(
        "{}, behind the node agent on {}",
        counted(sets.len(), "DaemonSet"),
        counted(behind.len(), "node")
    ));
}

fn other_plugins(snapshot: &Snapshot, report: &mut Report) {
    for set in &snapshot.daemon_sets {
        let shown = format!("DaemonSet {}/{}", set.namespace().unwrap_or_default(), set.name_any());
        if runs(set, &["tkestack/gpu-manager", "projecthami/hami", "vgpu-manager", "gpushare-device-plugin"])
        {
            let found = format!(
                "{shown} runs another GPU sharing plugin ({})",
                images(set).collect::<Vec<_>>().join(", ")
            );
            report.add(
                Level::NoGo,
                found,
                "Keep it off the nodes that are bridged: two plugins would allocate the same cards",
            );
        }
    }
    if snapshot.daemon_sets.is_empty() && !snapshot.settings_requested {
        return report.skipped("the files contain no DaemonSet".to_owned());
    }
    report.good("no other sharing plugin is running".into());
}

fn quotas(snapshot: &Snapshot, report: &mut Report) {
    let translations = quota::translate(snapshot, None);
    for translation in &translations {
        match translation {
            Err(error) => report.add(
                Level::NoGo,
                error.to_string(),
                "Correct the quota, or write a policy for the project",
            ),
            Ok(one) if !one.present => {
                let found = format!(
                    "ResourceQuota {}/{} allows {} cards and has no limit on shares: converted pods are not limited by it",
                    one.namespace, one.name, one.cards
                );
                report.add(Level::NoGo, found, "gpu-migrate quota translate --apply, or decide that shares need no limit and remove the quota");
            }
            Ok(_) => {}
        }
    }
    report.good(match translations.len() {
        0 => "no opted-in namespace limits whole cards".into(),
        n => format!("quotas on cards that have limits on shares: {n}"),
    });
}

fn pods(snapshot: &Snapshot, report: &mut Report) {
    let mut objects =
        snapshot.pods.iter().filter(|pod| !is_terminal(pod)).filter_map(pod_as_created).collect::<Vec<_>>();
    objects.extend(snapshot.namespaces.iter().filter_map(|namespace| manifest("v1", "Namespace", namespace)));
    objects.extend(
        snapshot
            .migrations
            .iter()
            .filter_map(|policy| manifest("gpu-migrate.io/v1alpha1", "GPUMigration", policy)),
    );
    let (rules, problems) = Rules::take_from(&mut objects);
    for one in &snapshot.unreadable {
        report.add(Level::NoGo, format!("cannot be read: {one}"), "Correct the object: it is ignored");
    }
    for problem in problems {
        report.add(Level::NoGo, problem.to_string(), "Correct the policy: it is ignored");
    }
    if rules.policy_count == 0 {
        report.add(
            Level::Warn,
            "no policy (GPUMigration): nothing is converted".into(),
            "Write a GPUMigration, see examples/policies.yaml",
        );
    }
    for policy in snapshot.migrations.iter().filter(|policy| !policy.spec.convert.target.is_ours()) {
        let target = policy.spec.convert.target;
        let found = format!(
            "policy {} converts to {target}: its scheduler and its plugin serve those pods, and gpu-migrate does not keep them apart from whole cards",
            policy.name_any()
        );
        report.add(Level::Warn, found, "Give that system nodes of its own, without a node agent of gpu-migrate and without NVIDIA's plugin, and send the pods there (spec.scheduling)");
    }
    let plan = decide(objects, &rules, "default");
    for entry in &plan.entries {
        if let Outcome::CannotConvert { why, then } = &entry.outcome {
            let level = if *then == Fallback::Deny { Level::NoGo } else { Level::Warn };
            report.add(
                level,
                format!("{} cannot be converted: {why}", entry.manifest),
                "Change the pod, or opt it out: gpu-migrate.io/opt-out: \"true\"",
            );
        }
    }
    if let Some(pod) = snapshot.pods.iter().find(|pod| !is_terminal(pod) && init_asks(pod)) {
        let found = format!(
            "{}/{} uses cards in an init container",
            pod.namespace().unwrap_or_default(),
            pod.name_any()
        );
        report.add(Level::Warn, found, "A kubelet of 1.33 kills such pods when it restarts: restart kubelets before or after, not while they run");
    }
    let converted = plan.converted().filter(|(_, converted)| !converted.guard).count();
    report.good(format!("running pods that would be converted: {converted}; none is an obstacle"));
}

/// Running pods of other systems that share cards.
fn other_systems(snapshot: &Snapshot, report: &mut Report) {
    let mut found: BTreeMap<&str, (usize, String)> = BTreeMap::new();
    for pod in snapshot.pods.iter().filter(|pod| !is_terminal(pod)) {
        let value = serde_json::to_value(pod).unwrap_or_default();
        for request in systems::requests(&value) {
            let first = || format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
            found.entry(request.system).or_insert_with(|| (0, first())).0 += 1;
        }
    }
    for (system, (count, first)) in &found {
        report.add(
            Level::Warn,
            format!("{} of {system}; first {first}", counted(*count, "pod")),
            "They keep their requests. Keep that system's plugin off nodes that are bridged: two plugins would give out the same cards",
        );
    }
    report.good("no pod requests shares of another system".to_owned());
}

fn init_asks(pod: &Pod) -> bool {
    use gpu_migrate_model::ask::ContainerKind;
    PodAsk::of(pod, &Dialect::default())
        .is_ok_and(|ask| ask.asking().any(|container| container.kind == ContainerKind::Init))
}

/// A running pod as it would be re-created: without node and cards, and with the label of a wave.
fn pod_as_created(pod: &Pod) -> Option<Manifest> {
    let mut pod = pod.clone();
    pod.spec.as_mut()?.node_name = None;
    pod.annotations_mut().retain(|key, _| !is_of_choice(key));
    pod.labels_mut().insert(names::CONVERT.to_owned(), "true".to_owned());
    manifest("v1", "Pod", &pod)
}

fn manifest<K: kube::Resource + serde::Serialize>(
    api_version: &str,
    kind: &str,
    object: &K,
) -> Option<Manifest> {
    let mut value = serde_json::to_value(object).ok()?;
    // A status may be written by other versions, and is not needed.
    value.as_object_mut()?.remove("status");
    Some(Manifest {
        origin: Origin { source: Source::Cluster, document: 1, line: 1, items: Vec::new() },
        api_version: api_version.to_owned(),
        kind: kind.to_owned(),
        namespace: object.meta().namespace.clone(),
        name: object.meta().name.clone().unwrap_or_default(),
        value,
        more: 0,
    })
}

fn invariants(snapshot: &Snapshot, report: &mut Report) {
    let found = verify::findings(snapshot);
    for violation in found.violations {
        report.add(Level::NoGo, violation, "gpu-migrate verify shows all; delete one of the holders");
    }
    if found.cards == 0 {
        return report.skipped("no node agent reports a card yet".to_owned());
    }
    report.good(format!("I1 and I2 hold on {}", counted(found.cards, "card")));
}

pub(crate) fn preflight(snapshot: &Snapshot) -> Answer {
    answer(&findings(snapshot))
}

/// The findings, and whether one of them is a no-go.
pub(super) fn answer(findings: &[Finding]) -> Answer {
    let go = findings.iter().all(|finding| finding.level != Level::NoGo);
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.level {
            Level::Good => paint(ADDED, "ok     "),
            Level::Skipped => paint(FAINT, "skipped"),
            Level::Warn => paint(WARNING, "warning"),
            Level::NoGo => paint(REMOVED, "no-go  "),
        };
        text += &format!("{mark}  {}: {}\n", finding.check, finding.found);
        if !finding.remedy.is_empty() {
            text += &format!("         {}\n", paint(FAINT, &finding.remedy));
        }
    }
    text += &if go { paint(ADDED, "go\n") } else { paint(REMOVED, "no-go\n") };
    let list = findings
        .iter()
        .map(|f| json!({"check": f.check, "level": format!("{:?}", f.level), "found": f.found, "remedy": f.remedy}))
        .collect::<Vec<Value>>();
    let exit = if go { Exit::Done } else { Exit::No };
    Answer { text, value: json!({"go": go, "findings": list}), exit }
}
