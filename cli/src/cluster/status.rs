//! `gpu-migrate status`: cards and their holders by node, and the progress of each project.

use super::screen::{self, Scroll, Size, View, fitted};
use super::{Answer, Output, Snapshot, columns, runtime};
use crate::args::{StatusArgs, StatusOutput};
use crate::exit::Exit;
use crate::style::{ADDED, FAINT, HEAD, PLACE, REMOVED, WARNING, blocks, counted, fit, paint};
use crossterm::event::KeyCode;
use gpu_migrate_model::card::CardState;
use gpu_migrate_model::crd::{CardStatus, GPUMigration, GPUShadow, HolderStatus};
use gpu_migrate_model::names::GROUP;
use gpu_migrate_model::text::and_more;
use gpu_migrate_model::units::Cores;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write};
use std::time::Duration;

const LEGEND: &str =
    "· free   L legacy   45 cores shared   down unhealthy   cord cordoned   both two kinds of holders";

/// Of more nodes the status shows sums, and those to look at.
const MANY: usize = 40;
/// So many of those.
const ODD: usize = 20;

impl From<StatusOutput> for Output {
    fn from(output: StatusOutput) -> Self {
        match output {
            StatusOutput::Table | StatusOutput::Wide | StatusOutput::Name => Self::Table,
            StatusOutput::Json => Self::Json,
            StatusOutput::Yaml => Self::Yaml,
        }
    }
}

/// Between two looks of `--watch`.
const INTERVAL: Duration = Duration::from_secs(2);

/// Once, or until q or Ctrl-C.
pub(crate) fn command(args: &StatusArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let cluster = &args.cluster;
    if !cluster.from.is_empty() {
        return Ok(status(&cluster.snapshot_of_files()?, args).write(args.output.into(), out)?);
    }
    runtime(async {
        let client = cluster.reach.client().await?;
        let drawn = matches!(args.output, StatusOutput::Table | StatusOutput::Wide);
        if args.watch && drawn && std::io::stdout().is_terminal() {
            let mut watched = Watched { args, scroll: Scroll::default() };
            return screen::run(INTERVAL, async || Snapshot::of_status(&client).await, &mut watched, out)
                .await;
        }
        let mut last = Vec::new();
        loop {
            let mut text = Vec::new();
            let exit =
                status(&Snapshot::of_status(&client).await?, args).write(args.output.into(), &mut text)?;
            if text != last {
                if args.output == StatusOutput::Yaml && !last.is_empty() {
                    writeln!(out, "---")?;
                }
                out.write_all(&text)?;
                out.flush()?;
                last = text;
            }
            if !args.watch {
                return Ok(exit);
            }
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                _ = tokio::signal::ctrl_c() => return Ok(exit),
            }
        }
    })
}

/// `--watch` on a terminal.
struct Watched<'a> {
    args: &'a StatusArgs,
    scroll: Scroll,
}

impl View<Snapshot> for Watched<'_> {
    fn title(&self) -> String {
        format!("every {INTERVAL:?}: q quit, ↑↓ scroll")
    }

    fn draw(&mut self, snapshot: &Snapshot, window: Size) -> String {
        fitted(&fit(&status(snapshot, self.args).text, Some(window.0)), window, &mut self.scroll)
    }

    fn press(&mut self, key: KeyCode, (_, height): Size) {
        self.scroll.press(key, height.saturating_sub(3));
    }
}

/// Pure.
pub(crate) fn status(snapshot: &Snapshot, args: &StatusArgs) -> Answer {
    let node = args.node.as_deref();
    if let Some(name) = node
        && !snapshot.shadows.iter().any(|shadow| shadow.name_any() == name)
    {
        let known = snapshot.shadows.iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>();
        let text = format!(
            "node {name}: no GPUShadow; there are {}\n",
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        );
        return Answer { text, value: json!({"nodes": [], "projects": []}), exit: Exit::No };
    }
    let mut shadows =
        snapshot.shadows.iter().filter(|s| node.is_none_or(|n| s.name_any() == n)).collect::<Vec<_>>();
    // The operator also writes GPUShadows of nodes without an agent: shown only with a problem.
    shadows.retain(|shadow| !cards(shadow).is_empty() || problem(shadow).is_some());
    shadows.sort_by_key(|shadow| shadow.name_any());
    let titles = !args.no_headers;
    let mut text: String = match args.output {
        StatusOutput::Name => {
            shadows.iter().map(|shadow| format!("gpushadow.{GROUP}/{}\n", shadow.name_any())).collect()
        }
        StatusOutput::Table if shadows.len() > MANY => summary(&shadows, titles),
        _ => map(&shadows, titles),
    };
    if args.output != StatusOutput::Name {
        if args.holders {
            text += &format!("\n{}", holder_table(&shadows, titles));
        }
        if node.is_none() {
            text += &format!("\n{}", projects(&snapshot.migrations, titles));
        }
    }
    for one in &snapshot.unreadable {
        text += &format!("{} not shown, because it cannot be read: {one}\n", paint(WARNING, "warning:"));
    }
    let value = json!({
        "nodes": shadows.iter().map(|s| json!({"name": s.name_any(), "status": s.status})).collect::<Vec<Value>>(),
        "projects": snapshot.migrations.iter().map(|m| json!({"name": m.name_any(), "project": m.spec.project, "mode": m.settings().mode, "status": m.status})).collect::<Vec<Value>>(),
    });
    // Neither a node agent nor a policy: the wrong cluster, or none of ours.
    let is_empty = snapshot.shadows.is_empty() && snapshot.migrations.is_empty();
    Answer { text, value, exit: if is_empty { Exit::No } else { Exit::Done } }
}

fn cards(shadow: &GPUShadow) -> &[CardStatus] {
    shadow.status.as_ref().map_or(&[], |status| status.cards.as_slice())
}

/// Sums of the nodes that have as many cards of the same model, then the nodes with something to look at.
fn summary(shadows: &[&GPUShadow], titles: bool) -> String {
    const TITLES: [&str; 8] =
        ["CARDS", "NODES", "FREE", "LEGACY", "SHARED", "CORES SHARED", "DOWN", "CORDONED"];
    let mut kinds: BTreeMap<String, [u64; 7]> = BTreeMap::new();
    for shadow in shadows {
        let cards = cards(shadow);
        let model = cards.first().map_or("", |card| card.card.model.as_str());
        let sum = kinds.entry(format!("{} × {model}", cards.len())).or_default();
        sum[0] += 1;
        for card in cards {
            let column = match card.state {
                CardState::Free => 1,
                CardState::Legacy => 2,
                CardState::Shared => 3,
                CardState::Unhealthy | CardState::Disputed => 5,
                CardState::Cordoned => 6,
            };
            sum[column] += 1;
            if card.state == CardState::Shared {
                sum[4] += u64::from(Cores::CARD.saturating_sub(card.cores_left).0);
            }
        }
    }
    let mut rows = head(&TITLES, titles);
    for (kind, sum) in kinds {
        let share = (sum[4]).checked_div(sum[3]).map_or_else(|| "-".to_owned(), |share| format!("{share}%"));
        let mut row = vec![kind];
        row.extend(
            sum.iter().enumerate().map(|(at, count)| if at == 4 { share.clone() } else { count.to_string() }),
        );
        rows.push(row);
    }
    let is_odd = |shadow: &&&GPUShadow| {
        let cards = cards(shadow);
        let fine =
            |card: &CardStatus| matches!(card.state, CardState::Free | CardState::Legacy | CardState::Shared);
        problem(shadow).is_some() || !cards.iter().all(fine)
    };
    let odd = shadows.iter().filter(is_odd).copied().collect::<Vec<_>>();
    let mut text = columns(&rows);
    if !odd.is_empty() {
        let shown = odd.get(..ODD).unwrap_or(&odd);
        text += &format!("\n{}:\n{}", counted(odd.len(), "node") + " to look at", map(shown, titles));
        if odd.len() > shown.len() {
            text += &format!("{}\n", and_more(odd.len() - shown.len()).trim_start());
        }
    }
    text + &paint(FAINT, &format!("{}; each of them: -o wide\n", counted(shadows.len(), "node")))
}

fn head(titles: &[&str], shown: bool) -> Vec<Vec<String>> {
    let row = titles.iter().map(|title| paint(HEAD, title)).collect();
    if shown { vec![row] } else { Vec::new() }
}

fn map(shadows: &[&GPUShadow], titles: bool) -> String {
    if shadows.is_empty() {
        return "No node reports its cards: is the node agent running? (kubectl get gpushadows)\n".to_owned();
    }
    let most = shadows.iter().map(|shadow| cards(shadow).len()).max().unwrap_or(0);
    let mut rows = head(&["NODE", "FREE"], titles);
    for row in &mut rows {
        row.extend((0..most).map(|index| paint(FAINT, &index.to_string())));
    }
    for shadow in shadows {
        let cards = cards(shadow);
        let free = cards.iter().filter(|card| card.state == CardState::Free).count();
        let mut row = vec![shadow.name_any(), format!("{free}/{}", cards.len())];
        row.extend(cards.iter().map(cell));
        if let Some(problem) = problem(shadow) {
            row.push(paint(WARNING, &problem));
        }
        rows.push(row);
    }
    let legend = if titles { paint(FAINT, LEGEND) + "\n" } else { String::new() };
    columns(&rows) + &legend
}

fn cell(card: &CardStatus) -> String {
    match card.state {
        CardState::Free => paint(ADDED, "·"),
        CardState::Legacy => paint(PLACE, "L"),
        CardState::Shared => Cores::CARD.saturating_sub(card.cores_left).0.to_string(),
        CardState::Unhealthy => paint(REMOVED, "down"),
        CardState::Cordoned => paint(WARNING, "cord"),
        CardState::Disputed => paint(REMOVED, "both"),
    }
}

fn problem(shadow: &GPUShadow) -> Option<String> {
    let conditions = shadow.status.iter().flat_map(|status| &status.conditions);
    let bad = conditions.filter(|condition| {
        (condition.type_ == "Ready" && condition.status != "True")
            || (["Drift", "PluginConflict"].contains(&condition.type_.as_str()) && condition.status == "True")
            || (["DriverInstalled", "DriverMatches", "IsolationReady", "ModeConverged"]
                .contains(&condition.type_.as_str())
                && condition.status == "False")
    });
    let messages =
        bad.map(|condition| format!("{}: {}", condition.type_, condition.message)).collect::<Vec<_>>();
    (!messages.is_empty()).then(|| messages.join("; "))
}

fn holder_table(shadows: &[&GPUShadow], titles: bool) -> String {
    let mut rows = head(&["NODE", "CARD", "POD", "CONTAINER", "HOLDS"], titles);
    for shadow in shadows {
        for (index, card) in cards(shadow).iter().enumerate() {
            for holder in &card.holders {
                rows.push(vec![
                    shadow.name_any(),
                    index.to_string(),
                    pod(holder),
                    holder.container.clone(),
                    holds(holder),
                ]);
            }
        }
    }
    columns(&rows)
}

fn pod(holder: &HolderStatus) -> String {
    if holder.pod.is_empty() {
        format!("(uid {})", holder.uid)
    } else {
        format!("{}/{}", holder.namespace, holder.pod)
    }
}

fn holds(holder: &HolderStatus) -> String {
    match (holder.cores, holder.blocks) {
        (None, None) => "the card".to_owned(),
        (cores, held) => format!("{} and {}", cores.unwrap_or_default(), blocks(held.unwrap_or_default())),
    }
}

fn projects(migrations: &[GPUMigration], shown: bool) -> String {
    if migrations.is_empty() {
        return "No policy (GPUMigration) exists: nothing is converted.\n".to_owned();
    }
    let titles = ["POLICY", "PROJECT", "MODE", "PHASE", "WAVE", "SHARED", "LEGACY", "WHY"];
    let mut rows = head(&titles, shown);
    for migration in migrations {
        let status = migration.status.clone().unwrap_or_default();
        let waves = migration.spec.rollout.waves.len();
        let wave = status
            .wave
            .filter(|_| waves > 0)
            .map_or_else(|| "-".to_owned(), |wave| format!("{wave}/{waves}"));
        let why = status
            .conditions
            .iter()
            .find(|c| c.type_ == "Ready")
            .map(|c| c.message.clone())
            .unwrap_or_default();
        rows.push(vec![
            migration.name_any(),
            migration.spec.project.clone(),
            format!("{:?}", migration.settings().mode),
            format!("{:?}", status.phase),
            wave,
            status.counts.converted.to_string(),
            status.counts.legacy.to_string(),
            why,
        ]);
    }
    columns(&rows)
}
