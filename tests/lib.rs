//! Tests that cross crates are in `tests/tests`, one file a subject; the scenarios on a real cluster are a crate of their own,
//! `tests/cluster`. The library has what tests of several crates share.

use std::{env, fs::OpenOptions, io::Write, path::PathBuf, thread};

/// Where `.ci/run` and the scenarios keep what they have downloaded or built.
#[must_use]
pub fn cache() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).map(PathBuf::from);
    let base = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    set("GPU_MIGRATE_CACHE").or_else(|| base().map(|base| base.join("gpu-migrate")))
}

/// Reports that the running test cannot run here: on standard error and, so that it is counted where the output of passing
/// tests is hidden, as a line `test: why` in the file that `GPU_MIGRATE_SKIPPED` names.
pub fn skipped(why: &str) {
    // The test harness names a test's thread after the test.
    let thread = thread::current();
    skipped_test(thread.name().unwrap_or("unnamed test"), why);
}

/// [`skipped`] for harnesses whose threads are not named after their tests.
pub fn skipped_test(test: &str, why: &str) {
    let line = format!("{test}: {}\n", why.replace('\n', " "));
    eprint!("skipped: {line}");
    let Some(path) = env::var_os("GPU_MIGRATE_SKIPPED") else { return };
    // One write: tests append at the same time.
    let written = OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("cannot write GPU_MIGRATE_SKIPPED={}: {error}", path.display());
    }
}
