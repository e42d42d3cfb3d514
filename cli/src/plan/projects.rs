//! What a plan comes to for each project: pods, their cards before and after, and what stays or is unclear.

use super::decide::demand;
use super::{Entry, Namespaces, Outcome, systems};
use crate::cluster::columns;
use crate::manifest::{Manifest, PodForm};
use crate::style::{HEAD, WARNING, paint};
use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::names::{self, FIXED_PROJECT, PROJECT};
use gpu_migrate_model::text::some_of;
use gpu_migrate_model::units::Cores;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// Objects that the text names; the others are counted.
const NAMED: usize = 3;

/// The objects of one project that request cards, or shares of any system.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Project {
    /// `None`: of no project.
    pub project: Option<String>,
    pub objects: usize,
    pub pods: u64,
    /// What their pods request now.
    pub cards_before: Cards,
    /// What they request when all is converted that can be.
    pub cards_after: Cards,
    /// Objects that the policy would convert and no wave reaches.
    pub in_no_wave: Vec<String>,
    pub unconvertible: Vec<String>,
    /// Objects that request shares of another system, and of which.
    pub other_systems: Vec<String>,
    /// Objects whose pods are not counted above: how many they make is not in the object.
    pub uncounted: Vec<String>,
}

/// An amount in hundredths of a card, by compute.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cards(pub u64);

impl Cards {
    fn of(demand: Demand) -> Self {
        Self(u64::from(demand.legacy) * u64::from(Cores::CARD.0) + u64::from(demand.cores.0))
    }

    fn number(self) -> f64 {
        self.0 as f64 / f64::from(Cores::CARD.0)
    }
}

impl fmt::Display for Cards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

impl Serialize for Cards {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.number())
    }
}

/// Pods of one template of an object.
struct Pods<'e> {
    template: &'e Value,
    /// How many; `None` where the object does not say.
    count: Option<u64>,
    /// What each requests, before and after.
    each: (Cards, Cards),
}

/// The projects of a plan, by name; what has none comes last.
pub(super) fn sums(entries: &[Entry], namespaces: &Namespaces, default_namespace: &str) -> Vec<Project> {
    let mut sums: BTreeMap<(bool, Option<String>), Project> = BTreeMap::new();
    for entry in entries {
        let pods = pods(entry);
        let other = pods.iter().flat_map(|pods| systems::requests(pods.template)).collect::<Vec<_>>();
        let requests = pods.iter().any(|pods| pods.each.0 > Cards(0))
            || matches!(entry.outcome, Outcome::Indirect { .. } | Outcome::CannotConvert { .. });
        if !requests && other.is_empty() {
            continue;
        }
        let labels = namespaces.get(entry.manifest.namespace.as_deref().unwrap_or(default_namespace));
        let project = pods.first().and_then(|pods| project_of(pods.template, labels));
        let sum = sums.entry((project.is_none(), project.clone())).or_default();
        sum.project = project;
        sum.add(entry, &pods, &other);
    }
    sums.into_values().collect()
}

impl Project {
    fn add(&mut self, entry: &Entry, pods: &[Pods<'_>], other: &[systems::Request]) {
        let name = || entry.manifest.to_string();
        let (mut in_no_wave, mut unconvertible) = (false, false);
        match &entry.outcome {
            Outcome::InNoWave { .. } => in_no_wave = true,
            Outcome::CannotConvert { .. } => unconvertible = true,
            Outcome::Indirect { templates, .. } => {
                in_no_wave = templates.iter().any(|template| template.in_no_wave);
                unconvertible = templates.iter().any(|template| template.unconvertible);
            }
            Outcome::Converted(_) | Outcome::LeftAlone { .. } => {}
        }
        self.objects += 1 + entry.manifest.more;
        self.in_no_wave.extend(in_no_wave.then(name));
        self.unconvertible.extend(unconvertible.then(name));
        if !other.is_empty() {
            let mut systems = other.iter().map(|request| request.system).collect::<Vec<_>>();
            systems.dedup();
            self.other_systems.push(format!("{} ({})", entry.manifest, systems.join(", ")));
        }
        for pods in pods {
            let Some(count) = pods.count else { continue };
            self.pods += count;
            self.cards_before.0 += count * pods.each.0.0;
            self.cards_after.0 += count * pods.each.1.0;
        }
        if pods.is_empty() || pods.iter().any(|pods| pods.count.is_none()) {
            self.uncounted.push(name());
        }
    }
}

/// The pods of an object, by template.
fn pods(entry: &Entry) -> Vec<Pods<'_>> {
    let manifest = &entry.manifest;
    let amounts = |(before, after): (Option<Demand>, Option<Demand>)| {
        let before = before.map(Cards::of).unwrap_or_default();
        (before, after.map_or(before, Cards::of))
    };
    if let Outcome::Indirect { templates, .. } = &entry.outcome {
        let only = templates.len() == 1;
        let pods = templates.iter().map(|template| Pods {
            template: &template.value,
            count: manifest.value["spec"]["replicas"]
                .as_u64()
                .filter(|_| only && template.path == "spec.template"),
            each: amounts(template.demand),
        });
        return pods.collect();
    }
    let Some(form) = manifest.pod_form() else { return Vec::new() };
    let Some(template) = manifest.value.pointer(form.pointer()) else { return Vec::new() };
    let each = match &entry.outcome {
        Outcome::Converted(converted) => converted.demand,
        _ => (demand(&manifest.value, form.pointer()), None),
    };
    vec![Pods { template, count: count(manifest, form), each: amounts(each) }]
}

/// How many pods an object makes at a time; `None` where that depends on the cluster.
fn count(manifest: &Manifest, form: PodForm) -> Option<u64> {
    if form == PodForm::Pod {
        return Some(1 + manifest.more as u64);
    }
    let number = |pointer: &str| manifest.value.pointer(pointer).and_then(Value::as_u64);
    match manifest.kind.as_str() {
        "DaemonSet" => None,
        // It is for others to use.
        "PodTemplate" => Some(0),
        "Job" => Some(number("/spec/parallelism").unwrap_or(1)),
        "CronJob" => Some(number("/spec/jobTemplate/spec/parallelism").unwrap_or(1)),
        _ => Some(number("/spec/replicas").unwrap_or(1)),
    }
}

fn project_of(template: &Value, namespace: Option<&BTreeMap<String, String>>) -> Option<String> {
    let own = template.pointer("/metadata/labels").and_then(|labels| labels[PROJECT].as_str());
    let of_namespace = |key: &str| namespace.and_then(|labels| labels.get(key)).map(String::as_str);
    names::project_of(own, of_namespace(PROJECT), of_namespace(FIXED_PROJECT)).map(str::to_owned)
}

/// The projects as a table, and what is to be looked at in each.
pub(super) fn table(projects: &[Project], titles: bool) -> String {
    if projects.is_empty() {
        return String::new();
    }
    const TITLES: [&str; 7] = ["PROJECT", "PODS", "CARDS", "AFTER", "NO WAVE", "UNCONVERTIBLE", "AMBIGUOUS"];
    let mut rows = Vec::new();
    rows.extend(titles.then(|| TITLES.map(|title| paint(HEAD, title)).to_vec()));
    let mut notes = String::new();
    for one in projects {
        let name = one.project.as_deref().unwrap_or("(none)");
        rows.push(vec![
            name.to_owned(),
            one.pods.to_string(),
            one.cards_before.to_string(),
            one.cards_after.to_string(),
            one.in_no_wave.len().to_string(),
            one.unconvertible.len().to_string(),
            one.other_systems.len().to_string(),
        ]);
        for (what, objects) in [
            ("no wave reaches", &one.in_no_wave),
            ("cannot be converted:", &one.unconvertible),
            ("ambiguous, with shares of another system:", &one.other_systems),
            ("not counted, because the number of pods is not in the object:", &one.uncounted),
        ] {
            if !objects.is_empty() {
                let what = paint(WARNING, &format!("{name}: {what}"));
                notes += &format!("{what} {}\n", some_of(NAMED, objects, ", "));
            }
        }
    }
    columns(&rows) + &notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hundredths_of_cards_are_shown_as_cards() {
        let table = [(0, "0"), (100, "1"), (1450, "14.5"), (33, "0.33"), (1_000_010, "10000.1")];
        for (hundredths, expected) in table {
            assert_eq!(Cards(hundredths).to_string(), expected);
        }
    }
}
