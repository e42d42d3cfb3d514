//! What migrating would give, as one HTML file: no script, nothing from the network, light and dark as the reader's system is.

use std::fmt::Write as _;

use super::card_map::svg;
use super::migrate::Gain;
use super::read::Snapshot;
use super::report::{LEGEND, afterwards, counts, counts_of_cards, freed, names, reasons, verdict};

const STYLE: &str = "\
:root{color-scheme:light dark;--bar:#4477aa;--legacy:#ccbb44;--rest:#d8d8d8;--line:#ccc}\
@media(prefers-color-scheme:dark){:root{--bar:#77aadd;--legacy:#aa9933;--rest:#444;--line:#555}}\
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid var(--line);text-align:left}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg text:not([fill]){fill:currentColor;font-size:13px}\
.free{fill:var(--rest);background:var(--rest)}.legacy{fill:var(--legacy);background:var(--legacy)}.shared{fill:var(--bar);background:var(--bar)}\
.key i{display:inline-block;width:.7em;height:.9em;margin-left:1em}";

/// A page around plots and text of a replay.
#[must_use]
pub fn of_replay(plots: &[String], text: &str) -> String {
    // The plots are made for paper.
    let plain = "svg rect[fill=white]{fill:none}";
    format!(
        "{}<style>{plain}</style>\n{}<pre>{}</pre>\n</body></html>\n",
        head("Replay of a trace"),
        plots.concat(),
        escaped(text)
    )
}

fn head(title: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>gpu-migrate simulate</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    )
}

/// The report.
#[must_use]
pub fn html(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let cards: u32 = snapshot.nodes.iter().map(|node| node.cards).sum();
    let mut page = head("What sharing cards would give");
    let _ = writeln!(
        page,
        "<p>{} nodes with {cards} cards, {} pods.</p>",
        snapshot.nodes.len(),
        snapshot.pods.len()
    );
    for note in gains.first().map(|gain| gain.notes.as_slice()).unwrap_or_default() {
        let _ = writeln!(page, "<p>Note: {}</p>", escaped(note));
    }
    page += &bars(gains, cards);
    let rows = gains.iter().map(|gain| {
        let (pods, moved) = counts(gain);
        let change = |before: f64, after: f64| format!("{before:.1} → {after:.1}");
        vec![
            gain.plan.clone(),
            format!("{moved} of {pods}"),
            format!("{} → {}", gain.before.held, gain.after.held),
            freed(gain).to_string(),
            change(gain.before.idle, gain.after.idle),
            change(gain.before.fragmented, gain.after.fragmented),
            format!("{}, {} start", gain.waiting.0, gain.waiting.1),
        ]
    });
    let head = ["Plan", "Pods moved", "Held", "Freed", "Idle", "Fragmented", "Waiting"];
    page += &table(&head.map(str::to_owned), rows, 1);
    page += &card_maps(snapshot, gains);
    page += "<h2>Projects</h2>\n";
    let head = ["Plan", "Project", "Pods", "Pods moved", "Cards", "Waiting", "Afterwards"].map(str::to_owned);
    page += &table(&head, projects(gains), 2);
    page += "<h2>Workloads</h2>\n";
    let mut head = ["Namespace", "Workload", "Pods", "Cards"].map(str::to_owned).to_vec();
    head.extend(gains.iter().map(|gain| gain.plan.clone()));
    let rows =
        gains.first().into_iter().flat_map(|first| first.workloads.iter().enumerate()).map(|(row, one)| {
            let mut cells =
                vec![one.namespace.clone(), one.name.clone(), one.pods.to_string(), one.cards.to_string()];
            cells.extend(gains.iter().map(|gain| gain.workloads.get(row).map(verdict).unwrap_or_default()));
            cells
        });
    page += &table(&head, rows, 2);
    let reasons = reasons(gains);
    if !reasons.is_empty() {
        page += "<h2>Why workloads stay</h2>\n<ul>\n";
        for reason in reasons {
            let _ = writeln!(page, "<li>{}</li>", escaped(reason.trim()));
        }
        page += "</ul>\n";
    }
    let _ = writeln!(page, "<p>{}</p>\n</body></html>", escaped(LEGEND).replace('\n', "<br>"));
    page
}

/// Cards that are held before and after, of all, one bar each.
fn bars(gains: &[Gain], cards: u32) -> String {
    const LEFT: f64 = 190.0;
    const WIDTH: f64 = 560.0;
    const ROW: f64 = 26.0;
    let before = gains.first().map(|gain| ("now".to_owned(), gain.before.held));
    let rows = before.into_iter().chain(gains.iter().map(|gain| (gain.plan.clone(), gain.after.held)));
    let rows = rows.collect::<Vec<_>>();
    let height = rows.len() as f64 * ROW + 8.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {} {height}\" width=\"100%\" role=\"img\"><title>Cards that are held, of {cards}</title>\n",
        LEFT + WIDTH + 90.0
    );
    for (row, (name, held)) in rows.iter().enumerate() {
        let y = row as f64 * ROW + 4.0;
        let width = WIDTH * f64::from(*held) / f64::from(cards.max(1));
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text><rect x=\"{LEFT}\" y=\"{y:.0}\" width=\"{WIDTH}\" height=\"18\" fill=\"var(--rest)\"/>\
             <rect x=\"{LEFT}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"18\" fill=\"var(--bar)\"/><text x=\"{:.0}\" y=\"{:.0}\">{held} of {cards}</text>",
            LEFT - 10.0,
            y + 14.0,
            escaped(name),
            LEFT + WIDTH + 10.0,
            y + 14.0
        );
    }
    svg + "</svg>\n"
}

/// Every card now and by each plan, as pictures and in numbers.
fn card_maps(snapshot: &Snapshot, gains: &[Gain]) -> String {
    let mut text = "<h2>Cards</h2>\n".to_owned();
    let mut head = vec!["Cards".to_owned(), "Now".to_owned()];
    head.extend(gains.iter().map(|gain| gain.plan.clone()));
    let rows = counts_of_cards(gains).map(|(name, counts)| {
        std::iter::once(name.to_owned()).chain(counts.iter().map(u32::to_string)).collect()
    });
    text += &table(&head, rows, 1);
    text += "<p class=\"key\"><i class=\"free\"></i> free <i class=\"legacy\"></i> held by a legacy pod \
             <i class=\"shared\"></i> shares, as high as the part of the card that they hold</p>\n";
    let now = gains.first().map(|gain| ("Now", &gain.map.before));
    let maps = now.into_iter().chain(gains.iter().map(|gain| (gain.plan.as_str(), &gain.map.after)));
    for (title, map) in maps {
        let _ = write!(text, "<h3>{}</h3>\n{}", escaped(title), svg(title, &names(snapshot), map));
    }
    text
}

/// Pods and their cards, by plan and project.
fn projects(gains: &[Gain]) -> impl Iterator<Item = Vec<String>> {
    gains.iter().flat_map(|gain| {
        gain.projects.iter().map(move |one| {
            let numbers = [one.pods, one.moved, one.cards, one.waiting.0].map(|number| number.to_string());
            let names = [gain.plan.clone(), one.name.clone()];
            names.into_iter().chain(numbers).chain([afterwards(one)]).collect()
        })
    })
}

/// A table whose columns from `numbers` on are aligned right.
fn table(head: &[String], rows: impl Iterator<Item = Vec<String>>, numbers: usize) -> String {
    let row = |cells: &[String], tag: &str| {
        let cell = |(index, text): (usize, &String)| {
            let class = if index >= numbers { " class=\"n\"" } else { "" };
            format!("<{tag}{class}>{}</{tag}>", escaped(text))
        };
        format!("<tr>{}</tr>\n", cells.iter().enumerate().map(cell).collect::<String>())
    };
    let body = rows.map(|cells| row(&cells, "td")).collect::<String>();
    format!("<table>\n{}{body}</table>\n", row(head, "th"))
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::migrate::{Project, Workload};

    #[test]
    fn the_page_of_a_replay_has_its_plots_and_its_text() {
        let page = of_replay(&["<svg></svg>".to_owned()], "a < b");
        assert!(
            page.contains("<svg></svg><pre>a &lt; b</pre>") && page.contains("prefers-color-scheme:dark"),
            "{page}"
        );
    }

    #[test]
    fn the_page_needs_nothing_else_and_shows_names_as_text() {
        let workload = Workload {
            namespace: "<a&b>".into(),
            name: "Deployment/x".into(),
            pods: 4,
            cards: 4,
            moved: 3,
            ..Workload::default()
        };
        let project =
            Project { name: "vision".into(), pods: 4, moved: 3, cards: 4, cards_after: 2.5, waiting: (2, 1) };
        let mut gain = Gain {
            plan: "half".into(),
            waiting: (2, 1),
            workloads: vec![workload],
            projects: vec![project],
            ..Gain::default()
        };
        (gain.before.held, gain.after.held) = (4, 2);
        let page = html(&Snapshot::default(), &[gain]);
        assert!(page.contains("&lt;a&amp;b&gt;") && !page.contains("<a&b>"), "{page}");
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("<svg "), "{page}");
        assert!(!page.contains("http") && !page.contains("<script"), "nothing is fetched or run: {page}");
        assert!(page.contains("<td class=\"n\">4 → 2</td>") && page.contains(">2, 1 start</td>"), "{page}");
        assert!(page.contains("<td>vision</td><td class=\"n\">4</td>"), "{page}");
        assert!(page.contains("<td class=\"n\">2.5 cards, 1 start</td>"), "{page}");
    }
}
