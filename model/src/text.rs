//! How messages count and list.

/// `1 workload`, `2 workloads`.
#[must_use]
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// ` and 2 more`, behind what is named; empty where that is all.
#[must_use]
pub fn and_more(count: usize) -> String {
    if count == 0 { String::new() } else { format!(" and {count} more") }
}

/// The first `most` of a list, and how many more there are: `a, b and 2 more`.
#[must_use]
pub fn some_of(most: usize, items: impl IntoIterator<Item = impl AsRef<str>>, separator: &str) -> String {
    let mut items = items.into_iter();
    let mut text = String::new();
    for (position, item) in items.by_ref().take(most).enumerate() {
        if position > 0 {
            text += separator;
        }
        text += item.as_ref();
    }
    text + &and_more(items.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_named_is_counted() {
        for (items, expected) in
            [(&[][..], ""), (&["a"], "a"), (&["a", "b"], "a, b"), (&["a", "b", "c", "d"], "a, b and 2 more")]
        {
            assert_eq!(some_of(2, items, ", "), expected);
        }
        assert_eq!((counted(1, "node"), counted(0, "node")), ("1 node".to_owned(), "0 nodes".to_owned()));
    }
}
