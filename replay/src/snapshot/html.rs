//! What migrating would give, as one HTML file: no script, nothing from the network, light and dark as the reader's system is.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::migrate::Gain;
use super::read::Snapshot;
use super::report::{LEGEND, counts, freed, reasons, verdict};

const STYLE: &str = "\
:root{color-scheme:light dark;--bar:#4477aa;--rest:#d8d8d8;--line:#ccc}\
@media(prefers-color-scheme:dark){:root{--bar:#77aadd;--rest:#444;--line:#555}}\
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid var(--line);text-align:left}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg text:not([fill]){fill:currentColor;font-size:13px}";

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
    page += "<h2>Namespaces</h2>\n";
    page += &table(
        &["Plan", "Namespace", "Pods", "Cards", "Pods moved"].map(str::to_owned),
        namespaces(gains).into_iter(),
        2,
    );
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

/// Pods, their cards and how many of them move, by plan and namespace.
fn namespaces(gains: &[Gain]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for gain in gains {
        let mut sums = BTreeMap::<&str, (u32, u32, u32)>::new();
        for one in &gain.workloads {
            let sum = sums.entry(&one.namespace).or_default();
            *sum = (sum.0 + one.pods, sum.1 + one.cards, sum.2 + one.moved);
        }
        rows.extend(sums.into_iter().map(|(namespace, (pods, cards, moved))| {
            vec![
                gain.plan.clone(),
                namespace.to_owned(),
                pods.to_string(),
                cards.to_string(),
                moved.to_string(),
            ]
        }));
    }
    rows
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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::migrate::Workload;

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
        let mut gain = Gain {
            plan: "half".into(),
            before: Default::default(),
            after: Default::default(),
            waiting: (2, 1),
            workloads: vec![workload],
            notes: Vec::new(),
        };
        (gain.before.held, gain.after.held) = (4, 2);
        let page = html(&Snapshot::default(), &[gain]);
        assert!(page.contains("&lt;a&amp;b&gt;") && !page.contains("<a&b>"), "{page}");
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("<svg "), "{page}");
        assert!(!page.contains("http") && !page.contains("<script"), "nothing is fetched or run: {page}");
        assert!(page.contains("<td class=\"n\">4 → 2</td>") && page.contains(">2, 1 start</td>"), "{page}");
    }
}
