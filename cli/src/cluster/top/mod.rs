//! `gpu-migrate top`: what is requested and used by node, container or project; pending pods.

mod record;
mod table;

use super::screen::{self, Scroll, Size, View, fitted};
use super::usage::Usage;
use super::{Answer, Output, Snapshot, runtime};
use crate::args::{TopArgs, TopBy, TopSort};
use crate::exit::Exit;
use crate::style::{WARNING, paint};
use crossterm::event::KeyCode;
use gpu_migrate_model::ask::{PodAsk, PodKind};
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{CardStatus, GPUShadow};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::units::{Cores, MIB_PER_BLOCK};
use gpu_migrate_model::usage::{CardUse, ContainerUse};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use record::Recorder;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write};
use std::time::Duration;
use table::{Part, holder_table, node_table, project_table, waiting_table};

/// Between two refreshes.
const INTERVAL: Duration = Duration::from_secs(2);
/// Likewise with `--record`: the node agents sample every five seconds.
const INTERVAL_RECORDED: Duration = Duration::from_secs(30);
/// Pods that are shown however small the window is.
const FEWEST: usize = 3;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeUse {
    node: String,
    cards: u32,
    free: u32,
    legacy: u32,
    shared: u32,
    other: u32,
    /// Cores in use; a legacy card is 100.
    cores: u32,
    /// MiB that shares hold, of the cards that shares are on.
    shared_mib: u64,
    /// MiB of those cards.
    of_mib: u64,
    /// By the cards themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<CardsUsed>,
}

/// What the cards of a node say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct CardsUsed {
    /// Percent, summed over the cards.
    percent: u32,
    memory_mib: u64,
    of_mib: u64,
}

/// What the processes of a container use, on all its cards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Used {
    /// Percent, summed over the cards: beside `cores`.
    percent: u32,
    memory_mib: u64,
}

/// One container with a card or a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Holder {
    pod: String,
    container: String,
    node: String,
    /// Empty where it has none.
    project: String,
    cards: Vec<u32>,
    cores: u32,
    /// 0 for a legacy holder.
    mib: u64,
    legacy: bool,
    /// Absent where the node agent does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<Used>,
}

/// All containers of a project.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Project {
    project: String,
    containers: u32,
    legacy_cards: u32,
    cores: u32,
    /// That shares hold.
    shared_mib: u64,
    /// Of the containers of which it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<Used>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Waiting {
    pod: String,
    asks: String,
    why: String,
}

fn node_use(shadow: &GPUShadow, usage: &Usage) -> NodeUse {
    let node = shadow.name_any();
    let used = usage.nodes.get(&node).and_then(|of_node| cards_used(&of_node.cards));
    let mut sum = NodeUse { node, used, ..NodeUse::default() };
    for card in cards(shadow) {
        sum.cards += 1;
        match card.state {
            CardState::Free => sum.free += 1,
            CardState::Legacy => {
                sum.legacy += 1;
                sum.cores += Cores::CARD.0;
            }
            CardState::Shared => sum.shared += 1,
            CardState::Unhealthy | CardState::Cordoned | CardState::Disputed => sum.other += 1,
        }
        let shares = card.holders.iter().filter(|holder| holder.is_share());
        let mut held = 0;
        for share in shares.clone() {
            sum.cores += share.cores.unwrap_or_default().0;
            held += u64::from(share.blocks.unwrap_or_default().0) * MIB_PER_BLOCK;
        }
        if shares.count() > 0 {
            sum.shared_mib += held;
            sum.of_mib += card.card.memory_mib;
        }
    }
    sum
}

/// `None` where no card says anything.
fn cards_used(cards: &[CardUse]) -> Option<CardsUsed> {
    let said = cards.iter().filter(|card| card.utilization_percent.or(card.temperature_celsius).is_some());
    let sum = |sum: Option<CardsUsed>, card: &CardUse| {
        let sum = sum.unwrap_or_default();
        Some(CardsUsed {
            percent: sum.percent + card.utilization_percent.unwrap_or_default(),
            memory_mib: sum.memory_mib + (card.memory_used_bytes.unwrap_or_default() >> 20),
            of_mib: sum.of_mib + (card.memory_bytes >> 20),
        })
    };
    said.fold(None, sum)
}

/// What a container uses on all cards of its node; `None` where its processes are not seen.
fn used<'u>(rows: impl Iterator<Item = &'u ContainerUse>) -> Option<Used> {
    let seen = rows.filter(|row| row.processes.is_some());
    let sum = |sum: Option<Used>, row: &ContainerUse| {
        let sum = sum.unwrap_or_default();
        Some(Used {
            percent: sum.percent + row.utilization_percent.unwrap_or_default(),
            memory_mib: sum.memory_mib + (row.memory_used_bytes.unwrap_or_default() >> 20),
        })
    };
    seen.fold(None, sum)
}

fn cards(shadow: &GPUShadow) -> &[CardStatus] {
    shadow.status.as_ref().map_or(&[], |status| status.cards.as_slice())
}

fn holders(snapshot: &Snapshot, usage: &Usage, sort: TopSort) -> Vec<Holder> {
    let project = projects_of_pods(snapshot);
    let mut all: Vec<Holder> = Vec::new();
    for shadow in &snapshot.shadows {
        let node = shadow.name_any();
        // Pods of other nodes are others.
        let begin = all.len();
        let on_node = usage.nodes.get(&node).map(|of_node| of_node.cards.as_slice()).unwrap_or_default();
        for (index, card) in (0..).zip(cards(shadow)) {
            for holder in &card.holders {
                let pod = if holder.pod.is_empty() {
                    format!("(uid {})", holder.uid)
                } else {
                    format!("{}/{}", holder.namespace, holder.pod)
                };
                let legacy = holder.cores.is_none() && holder.blocks.is_none();
                let cores = if legacy { Cores::CARD.0 } else { holder.cores.unwrap_or_default().0 };
                let mib = u64::from(holder.blocks.unwrap_or_default().0) * MIB_PER_BLOCK;
                let mut of_node = all.iter_mut().skip(begin);
                let same = of_node.find(|one| one.pod == pod && one.container == holder.container);
                match same {
                    Some(one) => {
                        one.cards.push(index);
                        one.cores += cores;
                        one.mib += mib;
                    }
                    None => all.push(Holder {
                        project: project.get(&pod).cloned().unwrap_or_default(),
                        used: used(on_node.iter().flat_map(|card| &card.containers).filter(|row| {
                            row.container == holder.container
                                && row.pod == holder.pod
                                && row.namespace == holder.namespace
                        })),
                        pod,
                        container: holder.container.clone(),
                        node: node.clone(),
                        cards: vec![index],
                        cores,
                        mib,
                        legacy,
                    }),
                }
            }
        }
    }
    all.sort_by(|a, b| {
        let key = |one: &Holder| (rank(sort, one.cores, one.used), one.cores, one.mib);
        key(b).cmp(&key(a)).then_with(|| a.pod.cmp(&b.pod))
    });
    all
}

/// What comes first has the greatest. What is not known comes last.
fn rank(sort: TopSort, cores: u32, used: Option<Used>) -> Option<u64> {
    match sort {
        TopSort::Cores => Some(cores.into()),
        TopSort::Used => Some(used?.percent.into()),
        TopSort::Memory => Some(used?.memory_mib),
        TopSort::Unused => Some(cores.saturating_sub(used?.percent).into()),
    }
}

/// The project of each pod that has one, by namespace and name.
fn projects_of_pods(snapshot: &Snapshot) -> BTreeMap<String, String> {
    let of_pod = snapshot.pods.iter().filter_map(|pod| {
        let namespace = pod.namespace().unwrap_or_default();
        let labels =
            snapshot.namespaces.iter().find(|one| one.name_any() == namespace).map(Namespace::labels);
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).map(String::as_str);
        let own = pod.labels().get(names::PROJECT).map(String::as_str);
        let project = names::project_of(own, label(names::PROJECT), label(names::FIXED_PROJECT))?;
        Some((format!("{namespace}/{}", pod.name_any()), project.to_owned()))
    });
    of_pod.collect()
}

fn projects(holders: &[Holder], sort: TopSort) -> Vec<Project> {
    let mut all: BTreeMap<&str, Project> = BTreeMap::new();
    for holder in holders {
        let sum = all.entry(&holder.project).or_default();
        sum.project.clone_from(&holder.project);
        sum.containers += 1;
        sum.cores += holder.cores;
        sum.shared_mib += holder.mib;
        if holder.legacy {
            sum.legacy_cards += u32::try_from(holder.cards.len()).unwrap_or(u32::MAX);
        }
        if let Some(used) = holder.used {
            let before = sum.used.unwrap_or_default();
            let (percent, memory_mib) = (before.percent + used.percent, before.memory_mib + used.memory_mib);
            sum.used = Some(Used { percent, memory_mib });
        }
    }
    let mut all: Vec<Project> = all.into_values().collect();
    all.sort_by_key(|one| std::cmp::Reverse((rank(sort, one.cores, one.used), one.cores)));
    all
}

fn waiting(snapshot: &Snapshot) -> Vec<Waiting> {
    let dialect = Dialect::default();
    let unbound = snapshot
        .pods
        .iter()
        .filter(|pod| !is_terminal(pod) && pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none()));
    let asking = unbound.filter_map(|pod| {
        let ask = PodAsk::of(pod, &dialect).ok()?;
        let kind = match ask.kind() {
            PodKind::Plain => return None,
            PodKind::Legacy => "whole cards",
            PodKind::Shared => "shares",
            PodKind::Mixed => "both kinds",
        };
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let why = conditions.filter(|c| c.type_ == "PodScheduled").find_map(|c| c.message.clone());
        Some(Waiting {
            pod: format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
            asks: kind.to_owned(),
            why: why.unwrap_or_default(),
        })
    });
    asking.collect()
}

/// What `top` shows, and how.
#[derive(Debug, Clone)]
struct Shown {
    by: TopBy,
    sort: TopSort,
    /// Pods of this namespace alone.
    namespace: Option<String>,
    /// Pods in whose names, node or project this is.
    filter: String,
    /// Rows of the second table and of waiting pods.
    part: Part,
    nodes: usize,
    width: usize,
    titles: bool,
}

impl Shown {
    fn of(args: &TopArgs) -> Self {
        Self {
            by: args.by,
            sort: args.sort,
            namespace: args.namespace.clone(),
            filter: args.filter.clone().unwrap_or_default(),
            part: Part { first: 0, most: args.limit },
            nodes: usize::MAX,
            width: usize::MAX,
            titles: !args.no_headers,
        }
    }

    /// Whether a pod, `namespace/name`, is shown; `also` is where else the text of the filter may be.
    fn shows(&self, pod: &str, also: &[&str]) -> bool {
        let in_namespace =
            |namespace: &String| pod.split_once('/').is_some_and(|(of_pod, _)| of_pod == namespace);
        self.namespace.as_ref().is_none_or(in_namespace)
            && also.iter().chain([&pod]).any(|text| text.contains(&self.filter))
    }
}

/// What `top` shows of a cluster.
struct Top {
    nodes: Vec<NodeUse>,
    holders: Vec<Holder>,
    projects: Vec<Project>,
    waiting: Vec<Waiting>,
}

impl Top {
    fn of(snapshot: &Snapshot, usage: &Usage, shown: &Shown) -> Self {
        let reporting = snapshot.shadows.iter().filter(|s| !cards(s).is_empty());
        let mut nodes = reporting.map(|shadow| node_use(shadow, usage)).collect::<Vec<_>>();
        nodes.sort_by(|a, b| a.node.cmp(&b.node));
        let mut holders = holders(snapshot, usage, shown.sort);
        holders.retain(|one| shown.shows(&one.pod, &[&one.container, &one.node, &one.project]));
        let mut waiting = waiting(snapshot);
        waiting.retain(|one| shown.shows(&one.pod, &[]));
        Self { nodes, projects: projects(&holders, shown.sort), holders, waiting }
    }

    /// Rows of the second table.
    fn rows(&self, by: TopBy) -> usize {
        match by {
            TopBy::Container => self.holders.len(),
            TopBy::Project => self.projects.len(),
        }
    }

    fn text(&self, missing: Option<&str>, shown: &Shown) -> String {
        let (part, titles) = (shown.part, shown.titles);
        let mut text = if self.nodes.is_empty() {
            "No node reports its cards: is the node agent running? (kubectl get gpushadows)\n".to_owned()
        } else {
            node_table(&self.nodes, shown.nodes, titles)
        };
        if !self.holders.is_empty() {
            text += "\n";
            text += &match shown.by {
                TopBy::Container => holder_table(&self.holders, part, shown.width, titles),
                TopBy::Project => project_table(&self.projects, part, titles),
            };
        }
        if let Some(missing) = missing {
            text += &format!("\n{}\n", paint(WARNING, missing));
        }
        if !self.waiting.is_empty() {
            let part = Part { first: 0, ..part };
            text += &format!("\n{}", waiting_table(&self.waiting, part, titles));
        }
        text
    }

    fn answer(&self, missing: Option<&str>, shown: &Shown) -> Answer {
        let value = json!({"nodes": self.nodes, "holders": self.holders, "projects": self.projects, "waiting": self.waiting});
        Answer { text: self.text(missing, shown), value, exit: Exit::Done }
    }
}

/// Once into a pipe or a file, otherwise repeatedly until q or Ctrl-C.
pub(crate) fn command(args: &TopArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let look = &args.look;
    let live = !args.once
        && look.cluster.from.is_empty()
        && look.output == Output::Table
        && std::io::stdout().is_terminal();
    let shown = Shown::of(args);
    let recorder = args.record.as_deref().map(|path| Recorder::open(path, &shown)).transpose()?;
    let interval = if recorder.is_some() { INTERVAL_RECORDED } else { INTERVAL };
    let interval = args.interval.map_or(interval, Duration::from_secs);
    if let (Some(recorder), false, false) = (&recorder, live, args.once) {
        return runtime(record::run(args, interval, recorder)).map(|()| Exit::Done);
    }
    let record = |snapshot: &Snapshot, usage: &Usage| {
        recorder.as_ref().map_or(Ok(()), |recorder| recorder.append(snapshot, usage))
    };
    if !live {
        let (snapshot, usage) = runtime(async {
            match look.cluster.from.is_empty() {
                true => read(&look.cluster.reach.client().await?).await,
                false => Ok((look.cluster.snapshot_of_files()?, Usage::default())),
            }
        })?;
        record(&snapshot, &usage)?;
        let top = Top::of(&snapshot, &usage, &shown);
        return Ok(top.answer(usage.missing.as_deref(), &shown).write(look.output, out)?);
    }
    runtime(async {
        let client = look.cluster.reach.client().await?;
        let mut live = Live { shown, interval, scroll: Scroll::default(), typing: false };
        let look = async || {
            let seen = read(&client).await?;
            record(&seen.0, &seen.1)?;
            Ok(seen)
        };
        screen::run(interval, look, &mut live, out).await
    })
}

/// `top` on a screen, and what keys make of it.
struct Live {
    shown: Shown,
    interval: Duration,
    scroll: Scroll,
    /// Keys go into the filter.
    typing: bool,
}

impl View<(Snapshot, Usage)> for Live {
    fn title(&self) -> String {
        let Shown { sort, filter, .. } = &self.shown;
        if self.typing {
            return format!("show pods with: {filter}▏ (Enter; Escape shows all)");
        }
        let filter = if filter.is_empty() { String::new() } else { format!(" ({filter})") };
        let sort = format!("{sort:?}").to_lowercase();
        format!(
            "every {:?}: q quit, ↑↓ scroll, s sort ({sort}), p by project, / filter{filter}",
            self.interval
        )
    }

    /// As many pods as leave room for nodes and waiting pods.
    fn draw(&mut self, (snapshot, usage): &(Snapshot, Usage), (width, height): Size) -> String {
        let (mut shown, missing) = (self.shown.clone(), usage.missing.as_deref());
        let top = Top::of(snapshot, usage, &shown);
        shown.width = width;
        shown.nodes = (height / 3).max(FEWEST);
        let limit = shown.part.most;
        let too_long = top.text(missing, &shown).lines().count().saturating_sub(height);
        shown.part.most = limit.saturating_sub(too_long + usize::from(too_long > 0)).max(FEWEST);
        shown.part.first = self.scroll.first(top.rows(shown.by), shown.part.most);
        fitted(&top.text(missing, &shown), (width, height), &mut Scroll::default())
    }

    fn press(&mut self, key: KeyCode, (_, height): Size) {
        let Shown { by, sort, filter, .. } = &mut self.shown;
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => (self.typing, *filter) = (false, String::new()),
            KeyCode::Backspace if self.typing => _ = filter.pop(),
            KeyCode::Char(sign) if self.typing => filter.push(sign),
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => *sort = next(*sort),
            KeyCode::Char('p') => *by = next(*by),
            key => self.scroll.press(key, height / 2),
        }
    }

    fn is_typing(&self) -> bool {
        self.typing
    }
}

/// The value behind this one, and behind the last the first.
fn next<T: clap::ValueEnum + PartialEq>(value: T) -> T {
    let all = T::value_variants();
    let at = all.iter().position(|one| *one == value).unwrap_or_default();
    all.get(at + 1).or(all.first()).cloned().unwrap_or(value)
}

/// The cluster, and what the node agents say.
async fn read(client: &Client) -> anyhow::Result<(Snapshot, Usage)> {
    let mut snapshot = Snapshot::of_cards(client).await?;
    // For projects; without the right to list them, pods' own labels name those.
    snapshot.namespaces = Api::all(client.clone())
        .list(&ListParams::default())
        .await
        .map(|list| list.items)
        .unwrap_or_default();
    let usage = Usage::of_agents(client, &snapshot).await;
    Ok((snapshot, usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(pod: &str) -> Holder {
        Holder {
            pod: pod.into(),
            container: "main".into(),
            node: "gpu-01".into(),
            cards: vec![0],
            cores: 50,
            mib: 3072,
            legacy: false,
            project: String::new(),
            used: None,
        }
    }

    #[test]
    fn a_window_of_80_columns_shows_the_amounts_and_shortens_the_names() {
        let holders = [
            holder("a-team-with-a-long-name/a-workload-with-a-very-long-name-5c7d9f8b6d-x2x4z"),
            holder("a/b"),
        ];
        let text = anstream::adapter::strip_str(&holder_table(&holders, ALL, 80, true)).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().skip(1).all(|line| line.ends_with("3.0 GiB")), "{text}");
        assert!(text.contains("a-team-with") && text.contains("…") && text.contains("x2x4z"), "{text}");
        assert!(!holder_table(&holders, ALL, 200, true).contains('…'));
    }

    pub(super) fn cluster() -> Snapshot {
        let card = |index: u32, holders: serde_json::Value| json!({"uuid": format!("GPU-{index}"), "minor": index, "memoryMiB": 24_576, "state": "Shared", "holders": holders});
        let share = |pod: &str, cores: u32| json!([{"namespace": "ns", "pod": pod, "uid": pod, "container": "c", "cores": cores, "blocks": 40}]);
        let shadow = json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "metadata": {"name": "gpu-01"}, "spec": {},
            "status": {"total": 2, "cards": [card(0, share("big", 80)), card(1, share("small", 20))]}});
        let pod = |name: &str, project: &str| json!({"metadata": {"name": name, "namespace": "ns", "labels": {names::PROJECT: project}}});
        Snapshot {
            shadows: vec![serde_json::from_value(shadow).unwrap()],
            pods: [("big", "vision"), ("small", "search")]
                .map(|(name, project)| serde_json::from_value(pod(name, project)).unwrap())
                .into(),
            ..Snapshot::default()
        }
    }

    pub(super) fn usage() -> Usage {
        let card = |pod: &str, percent: u32, gib: u64| {
            json!({"memoryBytes": 24_u64 << 30, "utilizationPercent": percent, "memoryUsedBytes": gib << 30, "containers": [
                {"namespace": "ns", "pod": pod, "container": "c", "kind": "shared", "processes": 1,
                 "utilizationPercent": percent, "memoryUsedBytes": gib << 30}]})
        };
        let node = json!({"cards": [card("big", 5, 2), card("small", 20, 6)]});
        let missing = Some("what is used on gpu-02 is not known: no answer within 2s".to_owned());
        Usage { nodes: [("gpu-01".to_owned(), serde_json::from_value(node).unwrap())].into(), missing }
    }

    const ALL: Part = Part { first: 0, most: 9 };

    pub(super) fn everything(by: TopBy, sort: TopSort) -> Shown {
        let (namespace, filter) = (None, String::new());
        Shown { by, sort, namespace, filter, part: ALL, nodes: usize::MAX, width: usize::MAX, titles: true }
    }

    fn shown(by: TopBy, sort: TopSort) -> String {
        let (usage, shown) = (usage(), everything(by, sort));
        let text = Top::of(&cluster(), &usage, &shown).text(usage.missing.as_deref(), &shown);
        anstream::adapter::strip_str(&text).to_string()
    }

    #[test]
    fn what_is_used_stands_beside_what_was_requested() {
        insta::assert_snapshot!(shown(TopBy::Container, TopSort::Cores), @"
        NODE    CARDS  FREE  LEGACY  SHARED  OTHER  CORES  SHARED MEMORY    GPU%  MEMORY%
        gpu-01  2      0     0       2       0      50%    41% of 48.0 GiB  12%   16%

        POD       CONTAINER  NODE    CARDS  CORES  MEMORY    GPU%  USED
        ns/big    c          gpu-01  0      80     10.0 GiB  5%    2.0 GiB
        ns/small  c          gpu-01  1      20     10.0 GiB  20%   6.0 GiB

        what is used on gpu-02 is not known: no answer within 2s
        ");
        insta::assert_snapshot!(shown(TopBy::Project, TopSort::Used), @"
        NODE    CARDS  FREE  LEGACY  SHARED  OTHER  CORES  SHARED MEMORY    GPU%  MEMORY%
        gpu-01  2      0     0       2       0      50%    41% of 48.0 GiB  12%   16%

        PROJECT  CONTAINERS  LEGACY CARDS  CORES  SHARED MEMORY  GPU%  USED
        search   1           0             20     10.0 GiB       20%   6.0 GiB
        vision   1           0             80     10.0 GiB       5%    2.0 GiB

        what is used on gpu-02 is not known: no answer within 2s
        ");
    }

    #[test]
    fn it_is_sorted_by_what_is_asked_for() {
        for (sort, first) in [
            (TopSort::Cores, "ns/big"),
            (TopSort::Used, "ns/small"),
            (TopSort::Memory, "ns/small"),
            (TopSort::Unused, "ns/big"),
        ] {
            assert_eq!(holders(&cluster(), &usage(), sort)[0].pod, first, "{sort:?}");
        }
    }

    #[test]
    fn pods_are_shown_by_namespace_and_by_any_text_of_their_row() {
        let cluster = cluster();
        for (namespace, filter, expected) in [
            (None, "", vec!["ns/big", "ns/small"]),
            (None, "sma", vec!["ns/small"]),
            (None, "vision", vec!["ns/big"]),
            (None, "gpu-01", vec!["ns/big", "ns/small"]),
            (Some("ns"), "big", vec!["ns/big"]),
            (Some("n"), "", vec![]),
        ] {
            let mut shown = everything(TopBy::Container, TopSort::Cores);
            (shown.namespace, shown.filter) = (namespace.map(str::to_owned), filter.to_owned());
            let top = Top::of(&cluster, &usage(), &shown);
            let pods = top.holders.iter().map(|holder| holder.pod.as_str()).collect::<Vec<_>>();
            assert_eq!(pods, expected, "{namespace:?} {filter:?}");
            assert_eq!(top.projects.len(), expected.len());
        }
    }

    #[test]
    fn keys_sort_change_the_rows_filter_and_scroll() {
        let seen = (cluster(), usage());
        let shown = everything(TopBy::Container, TopSort::Cores);
        let mut live =
            Live { shown, interval: Duration::from_secs(2), scroll: Scroll::default(), typing: false };
        let mut press = |keys: &[KeyCode]| {
            keys.iter().for_each(|key| live.press(*key, (80, 24)));
            let text = format!("{}\n{}", live.title(), live.draw(&seen, (80, 24)));
            anstream::adapter::strip_str(&text).to_string()
        };
        let first = |text: &str| {
            let rows =
                text.lines().skip_while(|line| !line.starts_with("POD") && !line.starts_with("PROJECT"));
            rows.skip(1).find_map(|line| line.split(' ').next().map(str::to_owned)).unwrap_or_default()
        };
        let screen = press(&[]);
        assert_eq!(first(&screen), "ns/big", "{screen}");
        let screen = press(&[KeyCode::Char('s')]);
        assert!(first(&screen) == "ns/small" && screen.contains("sort (used)"), "{screen}");
        let screen = press(&[KeyCode::Char('p')]);
        assert_eq!(first(&screen), "search", "{screen}");
        let screen = press(&[KeyCode::Char('p'), KeyCode::Char('/'), KeyCode::Char('b'), KeyCode::Char('x')]);
        assert!(screen.starts_with("show pods with: bx") && !screen.contains("ns/"), "{screen}");
        let screen = press(&[KeyCode::Backspace, KeyCode::Enter, KeyCode::Char('s')]);
        assert!(first(&screen) == "ns/big" && screen.contains("/ filter (b)"), "{screen}");
        assert!(!screen.contains("ns/small"), "{screen}");
        let screen = press(&[KeyCode::Char('/'), KeyCode::Esc]);
        assert!(screen.contains("ns/small"), "{screen}");
    }

    /// A thousand nodes and a hundred pods in 24 lines: some of each, and the rest by scrolling.
    #[test]
    fn a_large_cluster_fits_a_small_window() {
        let one = cluster();
        let mut large = Snapshot::default();
        for number in 0..1000 {
            let mut shadow = one.shadows[0].clone();
            shadow.metadata.name = Some(format!("gpu-{number:04}"));
            large.shadows.push(shadow);
        }
        let seen = (large, Usage::default());
        let shown =
            Shown { part: Part { first: 0, most: 20 }, ..everything(TopBy::Container, TopSort::Cores) };
        let mut live =
            Live { shown, interval: Duration::from_secs(2), scroll: Scroll::default(), typing: false };
        let draw = |live: &mut Live| anstream::adapter::strip_str(&live.draw(&seen, (80, 22))).to_string();
        let screen = draw(&mut live);
        assert!(screen.lines().count() <= 22 && screen.contains("all 1000"), "{screen}");
        assert!(screen.contains("\n1 to 8 and 1992 more (--limit)"), "{screen}");
        live.press(KeyCode::End, (80, 22));
        let screen = draw(&mut live);
        assert!(screen.contains("\n1993 to 2000 (--limit)"), "{screen}");
    }
}
