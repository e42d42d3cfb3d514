//! Any bytes as the kubelet's checkpoint: parsed or refused, never a panic; and a cut version of a file that parses is refused
//! or says the same, so that it frees no card.
#![no_main]

// The one module under test, not the crate around it: the fuzzer builds in a minute.
#[path = "../../src/checkpoint.rs"]
#[allow(dead_code)]
mod checkpoint;

use checkpoint::Checkpoint;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let Ok(whole) = Checkpoint::parse(text) else { return };
    // The end, where a cut is closest to a whole file, and 16 places before it.
    let end = text.len().saturating_sub(64);
    let step = (end / 16).max(1);
    for length in (0..end).step_by(step).chain(end..text.len()) {
        if let Ok(cut) = Checkpoint::parse(&text[..length]) {
            assert_eq!(cut, whole, "cut at {length} of {}", text.len());
        }
    }
});
