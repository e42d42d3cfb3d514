//! Any bytes as the kubelet's checkpoint: parsed or refused, never a panic. `cargo +nightly fuzz run checkpoint`.
#![no_main]

use gpu_migrate_plugin_bridge::checkpoint::Checkpoint;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let _ = Checkpoint::parse(text);
});
