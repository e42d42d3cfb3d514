//! Tests that cross crates stand in `tests/tests`, one file a subject. The scenarios on a real cluster are a crate of their
//! own, `tests/cluster`.
