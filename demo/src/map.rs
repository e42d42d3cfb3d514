//! The card map: one line a card, who is on it and how much of it is taken, as the observer sees it.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

use super::observer::{Cards, Use};
use super::script::NodeScript;

const LEGACY: Style = AnsiColor::Cyan.on_default();
const SHARED: Style = AnsiColor::Green.on_default();
const FREE: Style = Style::new().dimmed();

/// Characters of a card's bar; one for five cores.
const WIDTH: usize = 20;

/// A node and the UUIDs of its cards.
#[derive(Clone, Debug)]
pub struct MapNode {
    pub script: NodeScript,
    pub cards: Vec<String>,
}

#[must_use]
pub(super) fn render(nodes: &[MapNode], cards: &Cards) -> String {
    let mut text = String::new();
    let nobody = Vec::new();
    for node in nodes {
        let model = node.script.model.trim_start_matches("NVIDIA-").trim_start_matches("Tesla-");
        let _ = writeln!(
            text,
            "{}  {} × {model}, {} GiB",
            node.script.name,
            node.cards.len(),
            node.script.memory_mib.div_ceil(1024)
        );
        for (index, uuid) in node.cards.iter().enumerate() {
            let uses = cards.get(uuid).unwrap_or(&nobody);
            let _ = writeln!(text, "  {index} {} {}", bar(uses), who(uses));
        }
    }
    text
}

/// `node-a LL12.` : a letter a card — `L`egacy, the tenths of a shared card, `.` for free, `!` for what must not be.
#[must_use]
pub(super) fn line(nodes: &[MapNode], cards: &Cards) -> String {
    let sign = |uuid: &String| match cards.get(uuid).map(Vec::as_slice) {
        None | Some([]) => '.',
        Some([Use { share: None, .. }]) => 'L',
        Some(uses) if uses.iter().any(|one| one.share.is_none()) => '!',
        Some(uses) => {
            let tenths =
                uses.iter().filter_map(|one| one.share).map(|(cores, _)| cores).sum::<usize>().div_ceil(10);
            match u32::try_from(tenths).ok().and_then(|n| char::from_digit(n, 10)) {
                Some(digit) => digit,
                None if tenths == 10 => 'S',
                None => '!',
            }
        }
    };
    let node =
        |node: &MapNode| format!("{} {}", node.script.name, node.cards.iter().map(sign).collect::<String>());
    nodes.iter().map(node).collect::<Vec<_>>().join("   ")
}

/// What the signs of [`render`] mean.
pub(super) const LEGEND: &str = "█ legacy   ▓▒ shares, one after the other   · free   (a sign is 5 cores)";
/// What the signs of [`line`] mean.
pub(super) const LINE_LEGEND: &str =
    "a sign is a card: L legacy, 1 to 9 tenths of it shared, S all of it, . free";

/// A map with lines of at most `width` characters, in colour.
pub(super) fn painted(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let cut = line.chars().count() > width;
        let mut style = None;
        for sign in line.chars().take(if cut { width.saturating_sub(1) } else { width }) {
            let wanted = match sign {
                '█' => Some(LEGACY),
                '▓' | '▒' => Some(SHARED),
                '·' => Some(FREE),
                _ => None,
            };
            if wanted != style {
                out += &style.map(|style: Style| style.render_reset().to_string()).unwrap_or_default();
                out += &wanted.map(|style: Style| style.render().to_string()).unwrap_or_default();
                style = wanted;
            }
            out.push(sign);
        }
        out += &style.map(|style| style.render_reset().to_string()).unwrap_or_default();
        out += if cut { "…\n" } else { "\n" };
    }
    out
}

fn bar(uses: &[Use]) -> String {
    let mut bar = String::new();
    for (position, one) in uses.iter().enumerate() {
        let (sign, cores) = match one.share {
            None => ('█', 100),
            // Neighbours look different.
            Some((cores, _)) => (['▓', '▒'][position % 2], cores),
        };
        bar.extend(std::iter::repeat_n(sign, (cores * WIDTH / 100).max(1)));
    }
    let used = bar.chars().count();
    bar.extend(std::iter::repeat_n('·', WIDTH.saturating_sub(used)));
    bar
}

fn who(uses: &[Use]) -> String {
    let workload = |pod: &str| {
        // `namespace/deployment-hash-suffix` without what tells siblings apart.
        let parts: Vec<&str> = pod.rsplitn(3, '-').collect();
        if parts.len() == 3 { parts[2].to_owned() } else { pod.to_owned() }
    };
    let mut names: Vec<(String, usize)> = Vec::new();
    for one in uses {
        let name = workload(&one.pod);
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => names.push((name, 1)),
        }
    }
    let shown =
        names.iter().map(|(name, count)| if *count > 1 { format!("{name} ×{count}") } else { name.clone() });
    let shown = shown.collect::<Vec<_>>().join(", ");
    match uses {
        [] => "free".into(),
        [Use { share: None, .. }] => format!("legacy  {shown}"),
        _ => {
            let cores: usize = uses.iter().filter_map(|one| one.share).map(|(cores, _)| cores).sum();
            format!("{cores:>3} %   {shown}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(pod: &str, share: Option<(usize, usize)>) -> Use {
        Use { pod: pod.into(), holder: (pod.into(), "c".into()), share }
    }

    #[test]
    fn the_map_shows_who_has_what() {
        let script = NodeScript { name: "n".into(), cards: 3, model: "Tesla-T4".into(), memory_mib: 15360 };
        let nodes = [MapNode { script, cards: vec!["A".into(), "B".into(), "C".into()] }];
        let cards = Cards::from([
            ("A".into(), vec![used("d/train-abc-x1", None)]),
            ("B".into(), vec![used("d/chat-abc-x1", Some((50, 4))), used("d/chat-abc-x2", Some((25, 4)))]),
        ]);
        let expected = "n  3 × T4, 15 GiB\n  0 ████████████████████ legacy  d/train\n  \
            1 ▓▓▓▓▓▓▓▓▓▓▒▒▒▒▒·····  75 %   d/chat ×2\n  2 ···················· free\n";
        assert_eq!(render(&nodes, &cards), expected);
        assert_eq!(line(&nodes, &cards), "n L8.");
    }

    #[test]
    fn a_painted_map_is_the_same_map_and_fits() {
        let text = "  0 ██▓▒·· 100 %   a-team/a-long-name\n";
        assert_eq!(anstream::adapter::strip_str(&painted(text, 80)).to_string(), text);
        let cut = anstream::adapter::strip_str(&painted(text, 20)).to_string();
        assert_eq!(cut, "  0 ██▓▒·· 100 %   …\n");
        assert!(LEGEND.chars().count() <= 80 && LINE_LEGEND.chars().count() + 12 <= 90);
    }
}
