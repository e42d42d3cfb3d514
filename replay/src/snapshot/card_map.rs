//! Every card at a glance, now and afterwards: one sign a card in a text, one square a card in a picture.

use std::fmt::Write as _;

use gpu_migrate_model::card::{CardState, CardView};
use gpu_migrate_model::units::Cores;

use super::html::escaped;

/// What the signs mean.
pub(super) const LEGEND: &str =
    "CARDS: · free, L held by a legacy pod, 1 to 9 tenths of a card that shares hold, # all of it.";

/// The cards of a node, in their order.
#[must_use]
pub(super) fn signs(cards: &[CardView]) -> String {
    cards.iter().map(sign).collect()
}

fn sign(card: &CardView) -> char {
    match card.state {
        CardState::Free => '·',
        CardState::Shared => {
            let tenths = Cores::CARD.saturating_sub(card.cores_left).0.div_ceil(10).max(1);
            char::from_digit(tenths, 10).unwrap_or('#')
        }
        // Nothing else is in a snapshot.
        CardState::Legacy | CardState::Unhealthy | CardState::Cordoned | CardState::Disputed => 'L',
    }
}

/// How many tenths of a card shares hold.
fn tenths(sign: char) -> Option<u32> {
    if sign == '#' { Some(10) } else { sign.to_digit(10) }
}

/// Names of the sums of [`count`].
pub(super) const COUNTED: [&str; 5] =
    ["free", "held by legacy pods", "shared up to a half", "shared by more than a half", "shared in full"];

/// How many cards are held how.
pub(super) fn count(map: &[String]) -> [u32; 5] {
    let mut sums = [0; 5];
    for sign in map.iter().flat_map(|node| node.chars()) {
        let at = match tenths(sign) {
            None if sign == 'L' => 1,
            None => 0,
            Some(..=5) => 2,
            Some(..=9) => 3,
            Some(_) => 4,
        };
        sums[at] += 1;
    }
    sums
}

/// Width and height of a card, and what is between two.
const CARD: (u32, u32, u32) = (7, 10, 2);
const WIDTH: u32 = 900;

/// The cards as a picture, node beside node; of shares as much is filled as they hold.
pub(super) fn svg(title: &str, names: &[&str], map: &[String]) -> String {
    let (wide, high, gap) = CARD;
    let most = map.iter().map(|node| node.chars().count()).max().unwrap_or(0);
    let node_width = u32::try_from(most).unwrap_or(WIDTH) * (wide + gap) + 3 * gap;
    let in_row = (WIDTH / node_width).max(1);
    let rows = u32::try_from(map.len()).unwrap_or(u32::MAX).div_ceil(in_row);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {} {}\" width=\"100%\" role=\"img\"><title>{}</title>\n",
        WIDTH.max(node_width),
        rows * (high + 2 * gap),
        escaped(title)
    );
    for ((number, signs), name) in (0..).zip(map).zip(names) {
        let (mut x, y) = (number % in_row * node_width, number / in_row * (high + 2 * gap));
        let (mut free, mut legacy, mut shared) = (String::new(), String::new(), String::new());
        for sign in signs.chars() {
            let of = |path: &mut String, height: u32| {
                let _ = write!(path, "M{x} {}h{wide}v{height}h-{wide}z", y + high - height);
            };
            match tenths(sign) {
                None if sign == 'L' => of(&mut legacy, high),
                None => of(&mut free, high),
                Some(tenths) => {
                    of(&mut free, high);
                    of(&mut shared, (tenths * high).div_ceil(10));
                }
            }
            x += wide + gap;
        }
        let _ = write!(svg, "<g><title>{}: {signs}</title>", escaped(name));
        for (class, path) in [("free", free), ("legacy", legacy), ("shared", shared)] {
            if !path.is_empty() {
                let _ = write!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
            }
        }
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_migrate_model::units::{Blocks, CardIndex};

    #[test]
    fn a_card_is_one_sign() {
        for (state, cores_left, expected) in [
            (CardState::Free, 100, '·'),
            (CardState::Legacy, 0, 'L'),
            (CardState::Shared, 99, '1'),
            (CardState::Shared, 50, '5'),
            (CardState::Shared, 49, '6'),
            (CardState::Shared, 10, '9'),
            (CardState::Shared, 9, '#'),
            (CardState::Shared, 0, '#'),
        ] {
            let view = CardView {
                index: CardIndex(0),
                card: Default::default(),
                blocks: Blocks(40),
                cores_left: Cores(cores_left),
                blocks_left: Blocks(0),
                holders: 1,
                state,
            };
            assert_eq!(signs(&[view]), expected.to_string(), "{state:?} {cores_left}");
        }
    }

    /// Each card is counted once, and drawn where its node is.
    #[test]
    fn cards_are_counted_and_drawn() {
        let map = ["·L5".to_owned(), "6#".to_owned()];
        assert_eq!(count(&map), [1, 1, 1, 1, 1]);
        let svg = svg("now", &["<n1>", "n2"], &map);
        assert!(svg.contains("<title>&lt;n1&gt;: ·L5</title>"), "{svg}");
        assert!(svg.contains("<path class=\"legacy\" d=\"M9 0h7v10h-7z\"/>"), "{svg}");
        assert!(
            svg.contains("<path class=\"shared\" d=\"M18 5h7v5h-7z\"/></g>"),
            "half is half as high: {svg}"
        );
        assert!(svg.contains("<path class=\"shared\" d=\"M33 4h7v6h-7zM42 0h7v10h-7z\"/>"), "{svg}");
    }
}
