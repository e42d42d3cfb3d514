//! Checkpoints of real kubelets: each parses, and every truncation of each is parsed to the same rows or refused.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;

use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("checkpoint-"))
        .collect();
    files.sort();
    assert!(files.len() >= 13, "the corpus is there");
    files
        .iter()
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(p).unwrap()))
        .collect()
}

#[test]
fn every_capture_parses() {
    let summary: Vec<String> = corpus()
        .iter()
        .map(|(name, text)| {
            let read = Checkpoint::parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            let devices: usize = read.entries.iter().map(|e| e.ids.len()).sum();
            format!(
                "{name}: {} rows, {devices} devices, {} resources",
                read.entries.len(),
                read.registered.len()
            )
        })
        .collect();
    insta::assert_snapshot!(summary.join("\n"));
}

/// All that a checkpoint says.
fn parts<'a>(read: &'a Checkpoint<'_>) -> impl PartialEq + std::fmt::Debug + 'a {
    let registered: Vec<_> = read.registered.iter().map(|(name, ids)| (name, ids.get())).collect();
    (&read.entries, registered, &read.boot_id)
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
                assert_eq!(
                    parts(&read),
                    parts(&whole),
                    "{name} cut at {length} of {} was read as something else",
                    text.len()
                );
            }
        }
    }
}

/// A fuzzer for compilers without one: random damage to real files. `GPU_MIGRATE_FUZZ_SECONDS` sets how long (default 2).
#[test]
fn random_damage_is_parsed_or_refused() {
    use std::time::{Duration, Instant};
    let seconds = std::env::var("GPU_MIGRATE_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(2);
    let files = corpus();
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut random = move || {
        // xorshift64: the same damage in every run.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 8).unwrap()
    };
    let (began, mut parsed, mut refused) = (Instant::now(), 0_u64, 0_u64);
    while began.elapsed() < Duration::from_secs(seconds) {
        let mut text = files[random() % files.len()].1.clone();
        text.truncate(20_000);
        for _ in 0..=random() % 8 {
            let at = random() % text.len();
            match random() % 5 {
                0 => text[at] = u8::try_from(random() % 256).unwrap(),
                1 => text.insert(at, b"\"{}[],:0n\\"[random() % 10]),
                2 => drop(text.drain(at..(at + random() % 40).min(text.len()))),
                3 => text.extend_from_within(at..(at + random() % 40).min(text.len())),
                _ => text.truncate(at.max(1)),
            }
            if text.is_empty() {
                text.push(b'{');
            }
        }
        match Checkpoint::parse(&text) {
            Ok(_) => parsed += 1,
            Err(_) => refused += 1,
        }
    }
    println!("{parsed} parsed, {refused} refused in {seconds} s");
    assert!(refused > 0);
}
