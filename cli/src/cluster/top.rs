//! `gpu-migrate top`: what is requested and used by node, container or project; pending pods.

use super::usage::Usage;
use super::{Answer, Output, Snapshot, columns, runtime};
use crate::args::{TopArgs, TopBy, TopSort};
use crate::exit::Exit;
use crate::style::{ADDED, FAINT, HEAD, PLACE, WARNING, paint};
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
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Read as _, Write};
use std::time::Duration;

/// Cursor home and clear below: lines are overwritten without flicker.
const HOME: &str = "\x1b[H\x1b[J";
/// No pod's name is made shorter than this.
const NARROWEST: usize = 12;
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
                let same = all
                    .iter_mut()
                    .find(|one| one.pod == pod && one.container == holder.container && one.node == node);
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

fn percent(part: u64, whole: u64) -> String {
    (part * 100).checked_div(whole).map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

fn gib(mib: u64) -> String {
    format!("{:.1} GiB", mib as f64 / 1024.0)
}

/// As `kubectl top` calls them: of all cards of a node.
const USED: [&str; 2] = ["GPU%", "MEMORY%"];
/// The same of a container: percent of one card, and memory.
const USED_OF_ONE: [&str; 2] = ["GPU%", "USED"];

fn head(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|title| paint(HEAD, title)).collect()
}

fn used_of_one(used: Option<Used>) -> [String; 2] {
    used.map_or(["-".to_owned(), "-".to_owned()], |used| [format!("{}%", used.percent), gib(used.memory_mib)])
}

fn node_table(nodes: &[NodeUse]) -> String {
    let known = nodes.iter().any(|node| node.used.is_some());
    let mut titles = vec!["NODE", "CARDS", "FREE", "LEGACY", "SHARED", "OTHER", "CORES", "SHARED MEMORY"];
    titles.extend(known.then_some(USED).into_iter().flatten());
    let mut rows = vec![head(&titles)];
    let mut sum = NodeUse { node: "all".into(), ..NodeUse::default() };
    let row = |node: &NodeUse| {
        let some =
            |count: u32, style| if count == 0 { "0".to_owned() } else { paint(style, &count.to_string()) };
        let memory = if node.of_mib == 0 {
            "-".to_owned()
        } else {
            format!("{} of {}", percent(node.shared_mib, node.of_mib), gib(node.of_mib))
        };
        let mut row = vec![
            node.node.clone(),
            node.cards.to_string(),
            some(node.free, ADDED),
            some(node.legacy, PLACE),
            node.shared.to_string(),
            some(node.other, WARNING),
            percent(u64::from(node.cores), u64::from(node.cards) * u64::from(Cores::CARD.0)),
            memory,
        ];
        if known {
            row.extend(node.used.map_or(["-".to_owned(), "-".to_owned()], |used| {
                [
                    percent(used.percent.into(), u64::from(node.cards) * 100),
                    percent(used.memory_mib, used.of_mib),
                ]
            }));
        }
        row
    };
    for node in nodes {
        rows.push(row(node));
        sum.cards += node.cards;
        sum.free += node.free;
        sum.legacy += node.legacy;
        sum.shared += node.shared;
        sum.other += node.other;
        sum.cores += node.cores;
        sum.shared_mib += node.shared_mib;
        sum.of_mib += node.of_mib;
        if let Some(used) = node.used {
            let before = sum.used.unwrap_or_default();
            sum.used = Some(CardsUsed {
                percent: before.percent + used.percent,
                memory_mib: before.memory_mib + used.memory_mib,
                of_mib: before.of_mib + used.of_mib,
            });
        }
    }
    if nodes.len() > 1 {
        rows.push(row(&sum));
    }
    columns(&rows)
}

fn holder_table(holders: &[Holder], limit: usize, width: usize) -> String {
    let text = holder_rows(holders, limit, usize::MAX);
    let longest = text.lines().map(visible).max().unwrap_or(0);
    if longest <= width {
        return text;
    }
    // Names give way: the amounts are what one looks for.
    let name = holders.iter().take(limit).map(|holder| holder.pod.chars().count()).max().unwrap_or(0);
    holder_rows(holders, limit, name.saturating_sub(longest - width).max(NARROWEST))
}

fn visible(line: &str) -> usize {
    anstream::adapter::strip_str(line).to_string().chars().count()
}

/// Beginning and end of a name that is too long.
fn shortened(name: &str, width: usize) -> String {
    let signs = name.chars().collect::<Vec<_>>();
    if signs.len() <= width {
        return name.to_owned();
    }
    let (begin, end) = (width / 2, width - width / 2 - 1);
    signs[..begin].iter().chain(&['…']).chain(&signs[signs.len() - end..]).collect()
}

/// A text that fits a window: lines cut at its width, and the last ones left out.
fn fitted(text: &str, (width, height): (usize, usize)) -> String {
    let lines = text.lines().collect::<Vec<_>>();
    let shown = if lines.len() > height { &lines[..height.saturating_sub(1)] } else { &lines[..] };
    let mut out = shown.iter().map(|line| cut(line, width)).collect::<Vec<_>>().join("\n");
    if shown.len() < lines.len() {
        out += &format!("\n{}", paint(FAINT, &format!("and {} more lines", lines.len() - shown.len())));
    }
    out
}

/// A line of at most `width` signs, with its colours.
fn cut(line: &str, width: usize) -> String {
    if visible(line) <= width {
        return line.to_owned();
    }
    let (mut out, mut signs, mut escape) = (String::new(), 0, false);
    for sign in line.chars() {
        escape = escape || sign == '\x1b';
        if escape || signs + 1 < width {
            out.push(sign);
            signs += usize::from(!escape);
        }
        escape = escape && sign != 'm';
    }
    out + "…"
}

fn holder_rows(holders: &[Holder], limit: usize, name: usize) -> String {
    let known = holders.iter().any(|holder| holder.used.is_some());
    let mut titles = vec!["POD", "CONTAINER", "NODE", "CARDS", "CORES", "MEMORY"];
    titles.extend(known.then_some(USED_OF_ONE).into_iter().flatten());
    let mut rows = vec![head(&titles)];
    rows.extend(holders.iter().take(limit).map(|holder| {
        let cards = holder.cards.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let memory = if holder.legacy { "all".to_owned() } else { gib(holder.mib) };
        let cores = if holder.legacy {
            paint(PLACE, &format!("{} (legacy)", holder.cores))
        } else {
            holder.cores.to_string()
        };
        let mut row = vec![
            shortened(&holder.pod, name),
            holder.container.clone(),
            holder.node.clone(),
            cards,
            cores,
            memory,
        ];
        row.extend(known.then(|| used_of_one(holder.used)).into_iter().flatten());
        row
    }));
    let mut text = columns(&rows);
    if holders.len() > limit {
        text += &paint(FAINT, &format!("and {} more (--limit)\n", holders.len() - limit));
    }
    text
}

fn project_table(projects: &[Project], limit: usize) -> String {
    let known = projects.iter().any(|project| project.used.is_some());
    let mut titles = vec!["PROJECT", "CONTAINERS", "LEGACY CARDS", "CORES", "SHARED MEMORY"];
    titles.extend(known.then_some(USED_OF_ONE).into_iter().flatten());
    let mut rows = vec![head(&titles)];
    rows.extend(projects.iter().take(limit).map(|project| {
        let name = if project.project.is_empty() { "(none)" } else { &project.project };
        let mut row = vec![
            name.to_owned(),
            project.containers.to_string(),
            project.legacy_cards.to_string(),
            project.cores.to_string(),
            gib(project.shared_mib),
        ];
        row.extend(known.then(|| used_of_one(project.used)).into_iter().flatten());
        row
    }));
    columns(&rows)
}

/// What `top` shows, and how.
#[derive(Clone, Copy)]
struct View {
    by: TopBy,
    sort: TopSort,
    limit: usize,
    width: usize,
}

/// What `top` shows of a cluster.
fn top(snapshot: &Snapshot, usage: &Usage, view: View) -> Answer {
    let limit = view.limit;
    let shown = snapshot.shadows.iter().filter(|s| !cards(s).is_empty());
    let mut nodes = shown.map(|shadow| node_use(shadow, usage)).collect::<Vec<_>>();
    nodes.sort_by(|a, b| a.node.cmp(&b.node));
    let (holders, waiting) = (holders(snapshot, usage, view.sort), waiting(snapshot));
    let projects = projects(&holders, view.sort);
    let value = json!({"nodes": nodes, "holders": holders, "projects": projects, "waiting": waiting});
    let mut text = if nodes.is_empty() {
        "No node reports its cards: is the node agent running? (kubectl get gpushadows)\n".to_owned()
    } else {
        node_table(&nodes)
    };
    if !holders.is_empty() {
        text += "\n";
        text += &match view.by {
            TopBy::Container => holder_table(&holders, limit, view.width),
            TopBy::Project => project_table(&projects, limit),
        };
    }
    if let Some(missing) = &usage.missing {
        text += &format!("\n{}\n", paint(WARNING, missing));
    }
    if !waiting.is_empty() {
        let mut rows = vec![["WAITING", "ASKS FOR", "WHY"].map(|title| paint(HEAD, title)).to_vec()];
        rows.extend(
            waiting.iter().take(limit).map(|one| vec![one.pod.clone(), one.asks.clone(), one.why.clone()]),
        );
        text += &format!("\n{}", columns(&rows));
    }
    Answer { text, value, exit: Exit::Done }
}

/// Once into a pipe or a file, otherwise repeatedly until Ctrl-C.
pub(crate) fn command(args: &TopArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let look = &args.look;
    let live = !args.once
        && look.cluster.from.is_empty()
        && look.output == Output::Table
        && std::io::stdout().is_terminal();
    let view = View { by: args.by, sort: args.sort, limit: args.limit, width: usize::MAX };
    if !live {
        let (snapshot, usage) = runtime(async {
            match look.cluster.from.is_empty() {
                true => read(&look.cluster.client().await?).await,
                false => Ok((look.cluster.snapshot().await?, Usage::default())),
            }
        })?;
        return Ok(top(&snapshot, &usage, view).write(look.output, out)?);
    }
    runtime(async {
        let client = look.cluster.client().await?;
        let mut keys = Keys::start()?;
        let mut failed = None;
        loop {
            match read(&client).await {
                Ok((snapshot, usage)) => {
                    let size = terminal_size::terminal_size();
                    let size: (usize, usize) =
                        size.map_or((80, 24), |(width, height)| (width.0.into(), height.0.into()));
                    let head = format!("every {} s, q to quit", args.interval);
                    let view = View { width: size.0, ..view };
                    let text = page(&snapshot, &usage, view, size.1.saturating_sub(2));
                    let text = format!("{}\n\n{text}", paint(FAINT, &head));
                    write!(out, "{HOME}{}", text.replace('\n', "\r\n"))?;
                    failed = None;
                }
                // One failed refresh is tolerated, two in a row are not.
                Err(error) if failed.is_none() => {
                    write!(out, "\r\n{}", paint(WARNING, &format!("{error:#}; retrying")))?;
                    failed = Some(());
                }
                Err(error) => return Err(error),
            }
            out.flush()?;
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(args.interval)) => {}
                () = keys.quit() => break,
                _ = tokio::signal::ctrl_c() => break,
            }
        }
        drop(keys);
        writeln!(out)?;
        Ok(Exit::Done)
    })
}

/// What fits a window: as many pods as leave room for nodes and waiting pods.
fn page(snapshot: &Snapshot, usage: &Usage, view: View, height: usize) -> String {
    let text = |limit| top(snapshot, usage, View { limit, ..view }).text;
    let too_long = text(view.limit).lines().count().saturating_sub(height);
    let limit = view.limit.saturating_sub(too_long + usize::from(too_long > 0)).max(FEWEST);
    fitted(&text(limit), (view.width, height))
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

/// Keys that are pressed, while the terminal hands them over one by one.
struct Keys(tokio::sync::mpsc::Receiver<u8>);

impl Keys {
    fn start() -> std::io::Result<Self> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        if std::io::stdin().is_terminal() {
            crossterm::terminal::enable_raw_mode()?;
            // It ends with the process: nothing interrupts a read of a terminal.
            std::thread::spawn(move || {
                let mut bytes = std::io::stdin().lock().bytes();
                while let Some(Ok(key)) = bytes.next()
                    && sender.blocking_send(key).is_ok()
                {}
            });
        }
        Ok(Self(receiver))
    }

    /// Until q, Escape or Ctrl-C, which is no signal meanwhile.
    async fn quit(&mut self) {
        loop {
            match self.0.recv().await {
                Some(b'q' | 0x03 | 0x1b) => return,
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // Where it was not set this does nothing.
        let _ = crossterm::terminal::disable_raw_mode();
    }
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
        let text = anstream::adapter::strip_str(&holder_table(&holders, 9, 80)).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().skip(1).all(|line| line.ends_with("3.0 GiB")), "{text}");
        assert!(text.contains("a-team-with") && text.contains("…") && text.contains("x2x4z"), "{text}");
        assert!(!holder_table(&holders, 9, 200).contains('…'));
    }

    #[test]
    fn what_does_not_fit_is_counted_and_colours_end() {
        let text = format!("{}\nb\nc\nd", paint(WARNING, "a-line-that-is-long"));
        let out = fitted(&text, (8, 3));
        assert_eq!(anstream::adapter::strip_str(&out).to_string(), "a-line-…\nb\nand 2 more lines");
        assert!(out.lines().next().unwrap().contains("\x1b[0m"), "{out:?}");
        assert_eq!(fitted("a\nb", (8, 3)), "a\nb");
    }

    fn cluster() -> Snapshot {
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

    fn usage() -> Usage {
        let card = |pod: &str, percent: u32, gib: u64| {
            json!({"memoryBytes": 24_u64 << 30, "utilizationPercent": percent, "memoryUsedBytes": gib << 30, "containers": [
                {"namespace": "ns", "pod": pod, "container": "c", "kind": "shared", "processes": 1,
                 "utilizationPercent": percent, "memoryUsedBytes": gib << 30}]})
        };
        let node = json!({"cards": [card("big", 5, 2), card("small", 20, 6)]});
        let missing = Some("what is used on gpu-02 is not known: no answer within 2s".to_owned());
        Usage { nodes: [("gpu-01".to_owned(), serde_json::from_value(node).unwrap())].into(), missing }
    }

    fn shown(by: TopBy, sort: TopSort) -> String {
        let view = View { by, sort, limit: 9, width: usize::MAX };
        anstream::adapter::strip_str(&top(&cluster(), &usage(), view).text).to_string()
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
}
