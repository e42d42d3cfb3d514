//! `gpu-migrate top`: usage by node, holders, pending pods.

use super::{Answer, Output, Snapshot, columns, runtime};
use crate::args::TopArgs;
use crate::exit::Exit;
use crate::style::{ADDED, FAINT, HEAD, PLACE, WARNING, paint};
use gpu_migrate_model::ask::{PodAsk, PodKind};
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{CardStatus, GPUShadow};
use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::units::{Cores, MIB_PER_BLOCK};
use kube::ResourceExt as _;
use serde::Serialize;
use serde_json::json;
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
}

/// One container with a card or a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Holder {
    pod: String,
    container: String,
    node: String,
    cards: Vec<u32>,
    cores: u32,
    /// 0 for a legacy holder.
    mib: u64,
    legacy: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Waiting {
    pod: String,
    asks: String,
    why: String,
}

fn node_use(shadow: &GPUShadow) -> NodeUse {
    let mut sum = NodeUse { node: shadow.name_any(), ..NodeUse::default() };
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

fn cards(shadow: &GPUShadow) -> &[CardStatus] {
    shadow.status.as_ref().map_or(&[], |status| status.cards.as_slice())
}

fn holders(snapshot: &Snapshot) -> Vec<Holder> {
    let mut all: Vec<Holder> = Vec::new();
    for shadow in &snapshot.shadows {
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
                let node = shadow.name_any();
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
                        pod,
                        container: holder.container.clone(),
                        node,
                        cards: vec![index],
                        cores,
                        mib,
                        legacy,
                    }),
                }
            }
        }
    }
    all.sort_by(|a, b| (b.cores, b.mib).cmp(&(a.cores, a.mib)).then_with(|| a.pod.cmp(&b.pod)));
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

fn node_table(nodes: &[NodeUse]) -> String {
    let titles = ["NODE", "CARDS", "FREE", "LEGACY", "SHARED", "OTHER", "CORES", "SHARED MEMORY"];
    let mut rows = vec![titles.map(|title| paint(HEAD, title)).to_vec()];
    let mut sum = NodeUse { node: "all".into(), ..NodeUse::default() };
    let row = |node: &NodeUse| {
        let some =
            |count: u32, style| if count == 0 { "0".to_owned() } else { paint(style, &count.to_string()) };
        let memory = if node.of_mib == 0 {
            "-".to_owned()
        } else {
            format!("{} of {}", percent(node.shared_mib, node.of_mib), gib(node.of_mib))
        };
        vec![
            node.node.clone(),
            node.cards.to_string(),
            some(node.free, ADDED),
            some(node.legacy, PLACE),
            node.shared.to_string(),
            some(node.other, WARNING),
            percent(u64::from(node.cores), u64::from(node.cards) * u64::from(Cores::CARD.0)),
            memory,
        ]
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
    let titles = ["POD", "CONTAINER", "NODE", "CARDS", "CORES", "MEMORY"];
    let mut rows = vec![titles.map(|title| paint(HEAD, title)).to_vec()];
    rows.extend(holders.iter().take(limit).map(|holder| {
        let cards = holder.cards.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let memory = if holder.legacy { "all".to_owned() } else { gib(holder.mib) };
        let cores = if holder.legacy {
            paint(PLACE, &format!("{} (legacy)", holder.cores))
        } else {
            holder.cores.to_string()
        };
        vec![
            shortened(&holder.pod, name),
            holder.container.clone(),
            holder.node.clone(),
            cards,
            cores,
            memory,
        ]
    }));
    let mut text = columns(&rows);
    if holders.len() > limit {
        text += &paint(FAINT, &format!("and {} more (--limit)\n", holders.len() - limit));
    }
    text
}

/// What `top` shows of a cluster.
pub(crate) fn top(snapshot: &Snapshot, limit: usize, width: usize) -> Answer {
    let mut nodes =
        snapshot.shadows.iter().filter(|s| !cards(s).is_empty()).map(node_use).collect::<Vec<_>>();
    nodes.sort_by(|a, b| a.node.cmp(&b.node));
    let (holders, waiting) = (holders(snapshot), waiting(snapshot));
    let value = json!({"nodes": nodes, "holders": holders, "waiting": waiting});
    let mut text = if nodes.is_empty() {
        "No node reports its cards: is the node agent running? (kubectl get gpushadows)\n".to_owned()
    } else {
        node_table(&nodes)
    };
    if !holders.is_empty() {
        text += &format!("\n{}", holder_table(&holders, limit, width));
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
    if !live {
        let snapshot = runtime(async {
            match look.cluster.from.is_empty() {
                true => Snapshot::of_cards(&look.cluster.client().await?).await,
                false => look.cluster.snapshot().await,
            }
        })?;
        return Ok(top(&snapshot, args.limit, usize::MAX).write(look.output, out)?);
    }
    runtime(async {
        let client = look.cluster.client().await?;
        let mut keys = Keys::start()?;
        let mut failed = None;
        loop {
            match Snapshot::of_cards(&client).await {
                Ok(snapshot) => {
                    let size = terminal_size::terminal_size();
                    let size: (usize, usize) =
                        size.map_or((80, 24), |(width, height)| (width.0.into(), height.0.into()));
                    let head = format!("every {} s, q to quit", args.interval);
                    let text = page(&snapshot, args.limit, (size.0, size.1.saturating_sub(2)));
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
fn page(snapshot: &Snapshot, limit: usize, size: (usize, usize)) -> String {
    let text = |limit| top(snapshot, limit, size.0).text;
    let too_long = text(limit).lines().count().saturating_sub(size.1);
    fitted(&text(limit.saturating_sub(too_long + usize::from(too_long > 0)).max(FEWEST)), size)
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
}
