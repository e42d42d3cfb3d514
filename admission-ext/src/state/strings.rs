//! One copy of each text that many objects have: namespaces, schedulers, node names, labels.

use std::collections::HashSet;
use std::sync::Arc;

use ahash::RandomState;

/// Fewer are never looked through for those that nobody has any more.
const FEW: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct Strings {
    known: HashSet<Arc<str>, RandomState>,
    /// How many may be known before those that nobody has are dropped.
    limit: usize,
}

impl Strings {
    /// Makes `text` the copy that others have.
    pub(super) fn share(&mut self, text: &mut Arc<str>) {
        if let Some(known) = self.known.get(&**text) {
            *text = Arc::clone(known);
            return;
        }
        if self.known.len() >= self.limit.max(FEW) {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.known.shrink_to_fit();
            self.limit = 2 * self.known.len();
        }
        self.known.insert(Arc::clone(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_one_and_what_nobody_has_is_dropped() {
        let mut strings = Strings::default();
        let (mut one, mut other): (Arc<str>, Arc<str>) = ("team".into(), "team".into());
        strings.share(&mut one);
        strings.share(&mut other);
        assert!(Arc::ptr_eq(&one, &other));
        for at in 0..10 * FEW {
            strings.share(&mut format!("node-{at}").into());
            assert!(strings.known.len() <= FEW);
        }
        let mut again: Arc<str> = "team".into();
        strings.share(&mut again);
        assert!(Arc::ptr_eq(&one, &again));
    }
}
