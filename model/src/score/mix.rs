//! The cluster's own mix of requests: which shapes come, and how often. Recent ones count more.

use std::collections::BTreeMap;

use super::capacity::Shape;

/// A request counts half after this many later ones.
const HALF_LIFE: u32 = 2_000;
/// Shapes that are counted separately; the rarest gives way to a new one.
const SHAPES: usize = 512;
/// Where weights are scaled back, long before they lose precision.
const LARGE: f64 = 1e12;

/// Shapes and their weights.
///
/// Instead of fading every weight at every request, each request weighs a little more than the one before.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    weights: BTreeMap<Shape, f64>,
    next: f64,
}

impl Default for Mix {
    fn default() -> Self {
        Self { weights: BTreeMap::new(), next: 1.0 }
    }
}

impl Mix {
    /// Counts one request.
    pub fn count(&mut self, shape: Shape) {
        self.add(shape, self.next);
        self.next *= (1.0 / f64::from(HALF_LIFE)).exp2();
        if self.next > LARGE {
            self.weights.values_mut().for_each(|weight| *weight /= self.next);
            self.next = 1.0;
        }
    }

    /// Adds `weight` to a shape, on the scale of requests. Weights that are not positive are ignored.
    pub fn add(&mut self, shape: Shape, weight: f64) {
        if weight.is_nan() || weight <= 0.0 {
            return;
        }
        if self.weights.len() >= SHAPES && !self.weights.contains_key(&shape) {
            let rarest =
                self.weights.iter().min_by(|one, other| one.1.total_cmp(other.1)).map(|(shape, _)| *shape);
            if let Some(rarest) = rarest {
                self.weights.remove(&rarest);
            }
        }
        *self.weights.entry(shape).or_insert(0.0) += weight;
    }

    /// How many of the latest requests were counted, each as much as the last one: older ones count less.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weights.values().sum::<f64>() / self.next
    }

    /// How many shapes are counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Nothing was counted yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    /// All shapes and their part of the whole, most frequent first. The parts add up to 1.
    #[must_use]
    pub fn parts(&self) -> Vec<(Shape, f64)> {
        self.typical(1.0)
    }

    /// The most frequent shapes that make up `cover` of all requests, most frequent first. Their parts add up to 1.
    #[must_use]
    pub fn typical(&self, cover: f64) -> Vec<(Shape, f64)> {
        let mut parts: Vec<(Shape, f64)> =
            self.weights.iter().map(|(shape, weight)| (*shape, *weight)).collect();
        parts.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        let all: f64 = parts.iter().map(|(_, weight)| weight).sum();
        let mut seen = 0.0;
        let enough = parts.iter().position(|(_, weight)| {
            seen += weight;
            seen >= all * cover
        });
        parts.truncate(enough.map_or(parts.len(), |last| last + 1));
        let kept: f64 = parts.iter().map(|(_, weight)| weight).sum();
        parts.iter_mut().for_each(|(_, weight)| *weight /= kept);
        parts
    }
}

impl FromIterator<Shape> for Mix {
    /// Every request counts the same, old or new.
    fn from_iter<I: IntoIterator<Item = Shape>>(requests: I) -> Self {
        let mut mix = Self::default();
        requests.into_iter().for_each(|shape| mix.add(shape, 1.0));
        mix
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::capacity::CardRequest;
    use crate::units::{Blocks, Cores};

    fn share(cores: u32) -> Shape {
        Shape::cards(CardRequest::Share { cores: Cores(cores), blocks: Blocks::ZERO })
    }

    #[test]
    fn parts_add_up_and_the_most_frequent_comes_first() {
        let mix: Mix = [10, 20, 20, 20, 30, 30].into_iter().map(share).collect();
        let parts = mix.parts();
        assert_eq!(
            parts.iter().map(|(shape, _)| *shape).collect::<Vec<_>>(),
            [share(20), share(30), share(10)]
        );
        assert!((parts.iter().map(|(_, part)| part).sum::<f64>() - 1.0).abs() < 1e-9);
        assert_eq!(mix.typical(0.8).len(), 2);
        assert!((mix.typical(0.5)[0].1 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_request_counts_half_after_its_half_life() {
        let mut mix = Mix::default();
        mix.count(share(1));
        (0..HALF_LIFE).for_each(|_| mix.count(share(2)));
        mix.count(share(3));
        let weight = |shape| mix.weights.get(&shape).copied().unwrap_or_default();
        assert!((weight(share(3)) / weight(share(1)) - 2.0).abs() < 0.01);
    }

    #[test]
    fn weights_stay_finite_and_shapes_few() {
        let mut mix = Mix::default();
        (0..200_000).for_each(|n| mix.count(share(n % 1_000)));
        assert_eq!(mix.len(), SHAPES);
        assert!(mix.weights.values().all(|weight| weight.is_finite() && *weight > 0.0));
        assert!(mix.next <= LARGE);
    }

    #[test]
    fn nonsense_is_not_counted() {
        let mut mix = Mix::default();
        [f64::NAN, 0.0, -1.0].into_iter().for_each(|weight| mix.add(share(1), weight));
        assert!(mix.is_empty());
        assert!(mix.parts().is_empty());
    }
}
