//! Checkpoints of real kubelets: each parses, and every truncation of each is parsed to the same rows or refused.

use std::path::PathBuf;

use gpu_migrate_plugin_bridge::checkpoint::Checkpoint;

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("checkpoint-"))
        .collect();
    files.sort();
    assert!(files.len() >= 13, "the corpus is there");
    files.iter().map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(p).unwrap())).collect()
}

#[test]
fn every_capture_parses() {
    let summary: Vec<String> = corpus()
        .iter()
        .map(|(name, text)| {
            let read = Checkpoint::parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            let devices: usize = read.entries.iter().map(|e| e.ids.len()).sum();
            format!("{name}: {} rows, {devices} devices, {} resources", read.entries.len(), read.registered.len())
        })
        .collect();
    insta::assert_snapshot!(summary.join("\n"));
}

#[test]
fn every_truncation_is_refused_or_says_the_same() {
    for (name, text) in corpus() {
        let whole = Checkpoint::parse(&text).unwrap();
        // Every length of the small files; of a large one every 97th, and all of its last 2,000.
        let step = if text.len() > 50_000 { 97 } else { 1 };
        let tail = text.len().saturating_sub(2_000);
        for length in (0..tail).step_by(step).chain(tail..text.len()) {
            if let Ok(read) = Checkpoint::parse(&text[..length]) {
                assert_eq!(read, whole, "{name} cut at {length} of {} was read as something else", text.len());
            }
        }
    }
}
