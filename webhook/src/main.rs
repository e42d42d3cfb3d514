//! Placeholder until the library is there.

fn main() {}
