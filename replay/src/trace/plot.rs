//! Curves over arrival as SVG: a hundred lines of text, where a plotting library would be a hundred crates.

use std::fmt::Write as _;

use super::experiment::{CurvePoint, Outcome, Spread};
use super::report::name;

/// Paul Tol's "bright" scheme: told apart by the colour-blind, on paper too.
const COLORS: [&str; 7] = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB"];
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 52.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Curve {
    Allocated,
    /// Idle compute of no use to the usual request.
    Fragmented,
}

impl Curve {
    /// Name of the file it goes into.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::Allocated => "allocated.svg",
            Self::Fragmented => "fragmented.svg",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Allocated => "GPU given out",
            Self::Fragmented => "GPU idle and of no use to the usual request",
        }
    }

    const fn of(self, point: &CurvePoint) -> Spread {
        match self {
            Self::Allocated => point.allocated,
            Self::Fragmented => point.fragmented,
        }
    }
}

/// Where the numbers are on the sheet.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
}

impl Scale {
    fn of(outcomes: &[Outcome], curve: Curve) -> Self {
        let points = || outcomes.iter().flat_map(|outcome| &outcome.curve);
        let last = points().map(|point| point.arrived).max().unwrap_or(100);
        let most = points().map(|point| curve.of(point).mean).fold(1.0, f64::max);
        // Allocation follows arrival until the cluster is nearly full: only what comes then differs.
        match curve {
            Curve::Allocated => Self { x: (70.0, f64::from(last.max(80))), y: (70.0, 100.0) },
            Curve::Fragmented => {
                Self { x: (0.0, f64::from(last.max(10))), y: (0.0, (most / 5.0).ceil() * 5.0) }
            }
        }
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let part = |value: f64, (least, most): (f64, f64)| (value - least) / (most - least);
        let across = LEFT + part(x, self.x) * (WIDTH - LEFT - RIGHT);
        let down = HEIGHT - BOTTOM - part(y, self.y) * (HEIGHT - TOP - BOTTOM);
        (across, down)
    }

    fn shows(&self, x: f64, y: f64) -> bool {
        (self.x.0..=self.x.1).contains(&x) && (self.y.0..=self.y.1).contains(&y)
    }
}

/// Draws one curve of every policy.
#[must_use]
pub fn draw(outcomes: &[Outcome], curve: Curve) -> String {
    let scale = Scale::of(outcomes, curve);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n<title>{0}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"26\" font-size=\"16\">{0}</text>\n",
        curve.title()
    );
    axes(&mut svg, &scale);
    for (number, outcome) in outcomes.iter().enumerate() {
        line(&mut svg, &scale, curve, outcome, COLORS[number % COLORS.len()]);
    }
    legend(&mut svg, &scale, curve, outcomes);
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String, scale: &Scale) {
    let step = |(least, most): (f64, f64)| {
        if most - least > 60.0 {
            20.0
        } else if most - least > 12.0 {
            5.0
        } else {
            1.0
        }
    };
    let ticks = |range: (f64, f64)| {
        let step = step(range);
        std::iter::successors(Some(range.0), move |tick| Some(tick + step))
            .take_while(move |tick| *tick <= range.1)
    };
    for tick in ticks(scale.y) {
        let ((x, y), (end, _)) = (scale.at(scale.x.0, tick), scale.at(scale.x.1, tick));
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{end:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick} %</text>",
            x - 8.0,
            y + 4.0
        );
    }
    for tick in ticks(scale.x) {
        let (x, y) = scale.at(tick, scale.y.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#666\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick} %</text>",
            y + 5.0,
            y + 20.0
        );
    }
    let (middle, bottom) = (LEFT + (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT - 10.0);
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">GPU asked for so far, in percent of the cluster's</text>"
    );
}

fn line(svg: &mut String, scale: &Scale, curve: Curve, outcome: &Outcome, color: &str) {
    let shown = outcome.curve.iter().map(|point| (f64::from(point.arrived), curve.of(point).mean));
    let points: Vec<String> = shown
        .filter(|(x, y)| scale.shows(*x, *y))
        .map(|(x, y)| {
            let (x, y) = scale.at(x, y);
            format!("{x:.1},{y:.1}")
        })
        .collect();
    let _ = writeln!(
        svg,
        "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"><title>{}</title></polyline>",
        points.join(" "),
        name(outcome)
    );
}

/// Names beside the ends of the lines, in the order of these, far enough apart to be read.
fn legend(svg: &mut String, scale: &Scale, curve: Curve, outcomes: &[Outcome]) {
    let end = |outcome: &Outcome| outcome.curve.last().map_or(0.0, |point| curve.of(point).mean);
    let mut order: Vec<usize> = (0..outcomes.len()).collect();
    order.sort_by(|one, other| end(&outcomes[*other]).total_cmp(&end(&outcomes[*one])));
    let mut above = TOP - 18.0;
    for number in order {
        let (_, y) = scale.at(scale.x.1, end(&outcomes[number]).clamp(scale.y.0, scale.y.1));
        let y = y.max(above + 18.0);
        above = y;
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\">{} {:.1} %</text>",
            WIDTH - RIGHT + 8.0,
            y + 4.0,
            COLORS[number % COLORS.len()],
            name(&outcomes[number]),
            end(&outcomes[number])
        );
    }
}
