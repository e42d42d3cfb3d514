//! The tables of `top`.

use super::{CardsUsed, Holder, NodeUse, Project, Used, Waiting};
use crate::cluster::columns;
use crate::style::{ADDED, FAINT, HEAD, PLACE, WARNING, paint, visible};
use gpu_migrate_model::text::and_more;
use gpu_migrate_model::units::Cores;

/// No pod's name is made shorter than this.
const NARROWEST: usize = 12;

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

fn head(titles: &[&str], shown: bool) -> Vec<Vec<String>> {
    let row = titles.iter().map(|title| paint(HEAD, title)).collect();
    if shown { vec![row] } else { Vec::new() }
}

fn used_of_one(used: Option<Used>) -> [String; 2] {
    used.map_or(["-".to_owned(), "-".to_owned()], |used| [format!("{}%", used.percent), gib(used.memory_mib)])
}

/// `most` nodes and the sum of all.
pub(super) fn node_table(nodes: &[NodeUse], most: usize, titles_shown: bool) -> String {
    let known = nodes.iter().any(|node| node.used.is_some());
    let mut titles = vec!["NODE", "CARDS", "FREE", "LEGACY", "SHARED", "OTHER", "CORES", "SHARED MEMORY"];
    titles.extend(known.then_some(USED).into_iter().flatten());
    let mut rows = head(&titles, titles_shown);
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
    rows.extend(nodes.iter().take(most).map(&row));
    for node in nodes {
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
        if nodes.len() > most {
            sum.node = format!("all {}", nodes.len());
        }
        rows.push(row(&sum));
    }
    columns(&rows)
}

/// Some of a list: where they begin, and how many at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) first: usize,
    pub(super) most: usize,
}

impl Part {
    fn of<T>(self, all: &[T]) -> impl Iterator<Item = &T> {
        all.iter().skip(self.first).take(self.most)
    }

    /// What is not shown of a list.
    fn rest(self, all: usize) -> String {
        let shown = self.most.min(all.saturating_sub(self.first));
        if shown == all {
            return String::new();
        }
        let below = and_more(all.saturating_sub(self.first + shown));
        paint(FAINT, &format!("{} to {}{below} (--limit)\n", self.first + 1, self.first + shown))
    }
}

pub(super) fn holder_table(holders: &[Holder], part: Part, width: usize, titles: bool) -> String {
    let text = holder_rows(holders, part, usize::MAX, titles);
    let longest = text.lines().map(visible).max().unwrap_or(0);
    if longest <= width {
        return text;
    }
    // Names give way: the amounts are what one looks for.
    let name = part.of(holders).map(|holder| holder.pod.chars().count()).max().unwrap_or(0);
    holder_rows(holders, part, name.saturating_sub(longest - width).max(NARROWEST), titles)
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

fn holder_rows(holders: &[Holder], part: Part, name: usize, shown: bool) -> String {
    let known = holders.iter().any(|holder| holder.used.is_some());
    let mut titles = vec!["POD", "CONTAINER", "NODE", "CARDS", "CORES", "MEMORY"];
    titles.extend(known.then_some(USED_OF_ONE).into_iter().flatten());
    let mut rows = head(&titles, shown);
    rows.extend(part.of(holders).map(|holder| {
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
    columns(&rows) + &part.rest(holders.len())
}

pub(super) fn project_table(projects: &[Project], part: Part, shown: bool) -> String {
    let known = projects.iter().any(|project| project.used.is_some());
    let mut titles = vec!["PROJECT", "CONTAINERS", "LEGACY CARDS", "CORES", "SHARED MEMORY"];
    titles.extend(known.then_some(USED_OF_ONE).into_iter().flatten());
    let mut rows = head(&titles, shown);
    rows.extend(part.of(projects).map(|project| {
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
    columns(&rows) + &part.rest(projects.len())
}

pub(super) fn waiting_table(waiting: &[Waiting], part: Part, shown: bool) -> String {
    let mut rows = head(&["WAITING", "ASKS FOR", "WHY"], shown);
    rows.extend(part.of(waiting).map(|one| vec![one.pod.clone(), one.asks.clone(), one.why.clone()]));
    columns(&rows) + &part.rest(waiting.len())
}
