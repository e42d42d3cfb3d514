//! The verifier against a stand-in for the driver and a small limiter in front of it, which is built with one fault at a time.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too, may fail loudly

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpu_migrate_verifier::client::{CUDA, Client, Setting};
use gpu_migrate_verifier::measure;
use gpu_migrate_verifier::probe::ALLOCATORS;
use gpu_migrate_verifier::report::{Measured, Report, Verdict, table};
use tempfile::TempDir;

const LIMIT_MIB: u64 = 1024;

/// NVIDIA's bindings that `.ci/run` installs below the cache, each in a Python environment of its own.
const BINDINGS: [&str; 2] = ["12.9.10", "13.5.0"];

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Builds a library from a source of this folder. `-Bsymbolic`: the driver's own table has its own functions, whoever stands in front.
fn build(source: &str, library: &Path, arguments: &[&str]) {
    let status = Command::new("cc")
        .args(["-std=gnu17", "-shared", "-fPIC", "-O1", "-Wl,--no-as-needed", "-Wl,-Bsymbolic", "-o"])
        .arg(library)
        .arg(here().join("tests").join(source))
        .args(arguments)
        .arg("-ldl")
        .status();
    assert!(status.unwrap().success(), "{source} {arguments:?}");
}

/// The libraries that a program of a container finds.
struct Libraries {
    folder: TempDir,
    preloaded: bool,
}

impl Libraries {
    fn new(preloaded: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("limit"), LIMIT_MIB.to_string()).unwrap();
        Self { folder, preloaded }
    }

    /// The driver alone.
    fn driver() -> Self {
        let all = Self::new(false);
        build("stub.c", &all.path("libcuda.so.1"), &["-Wl,-soname,libcuda.so.1"]);
        all
    }

    /// A limiter where programs look for the driver, in front of it.
    fn replacing(fault: Option<&str>) -> Self {
        let all = Self::new(false);
        let driver = all.path("libcuda-driver.so.1");
        build("stub.c", &driver, &["-Wl,-soname,libcuda-driver.so.1"]);
        let fault = fault.map(|fault| format!("-D{fault}"));
        let driver = driver.display().to_string();
        let mut arguments = vec![
            "-DREPLACES=\"libcuda-driver.so.1\"",
            "-Wl,-soname,libcuda.so.1",
            "-Wl,-rpath,$ORIGIN",
            driver.as_str(),
        ];
        arguments.extend(fault.as_deref());
        build("limiter.c", &all.path("libcuda.so.1"), &arguments);
        all
    }

    /// A limiter that the environment names.
    fn preloaded() -> Self {
        let all = Self { preloaded: true, ..Self::driver() };
        build("limiter.c", &all.path("limiter.so"), &[]);
        all
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn setting(&self) -> Setting {
        let mut environment = vec![("LD_LIBRARY_PATH".to_owned(), self.folder.path().display().to_string())];
        if self.preloaded {
            environment.push(("LD_PRELOAD".to_owned(), self.path("limiter.so").display().to_string()));
        }
        Setting { limit_mib: LIMIT_MIB, environment }
    }
}

/// The program as it was built: one that is written here could be held open by what another test starts.
fn c_clients() -> Vec<Client> {
    Client::of_c(&Path::new(env!("OUT_DIR")).join("client"))
}

fn report(isolation: &str, libraries: &Libraries, clients: &[Client]) -> Report {
    let setting = libraries.setting();
    let clients = clients.iter().map(|client| measure(client, &setting)).collect();
    Report { isolation: isolation.to_owned(), limit_mib: LIMIT_MIB, clients }
}

/// The probes that ended so.
fn with(measured: &Measured, verdict: Verdict) -> BTreeSet<&str> {
    let findings = measured.findings.iter().filter(|finding| finding.verdict == verdict);
    findings.map(|finding| finding.probe.as_str()).collect()
}

fn set<'a>(names: &[&'a str]) -> BTreeSet<&'a str> {
    names.iter().copied().collect()
}

#[test]
fn a_driver_that_limits_nothing_is_exceeded_by_every_probe() {
    let report = report("none", &Libraries::driver(), &c_clients());
    assert!(!report.holds());
    for measured in &report.clients {
        assert_eq!(measured.error, None);
        let absent = with(measured, Verdict::Absent);
        let exceeded = with(measured, Verdict::Exceeded);
        assert_eq!(absent.len() + exceeded.len(), measured.findings.len(), "{}", report.text());
        assert_eq!(
            absent.len(),
            usize::from(measured.client != CUDA[2].1),
            "pools of managed memory came with 13"
        );
        assert_eq!(measured.functions.len(), 1, "all functions are the driver's");
    }
}

#[test]
fn a_limiter_that_replaces_the_library_holds_every_probe() {
    let report = report("replaced", &Libraries::replacing(None), &c_clients());
    assert!(report.holds(), "{}", report.text());
    for measured in &report.clients {
        let malloc = measured.findings.iter().find(|finding| finding.probe == "malloc").unwrap();
        assert_eq!(malloc.mib, Some(LIMIT_MIB), "the whole limit can be had: {}", report.text());
        assert_eq!(measured.shown.unwrap().total, LIMIT_MIB);
        let files: Vec<_> = measured.functions.keys().filter_map(|file| file.rsplit('/').next()).collect();
        assert_eq!(files, ["libcuda-driver.so.1", "libcuda.so.1"], "{}", report.text());
    }
}

#[test]
fn a_limiter_that_the_environment_names_is_lost_with_it() {
    let report = report("preloaded", &Libraries::preloaded(), &c_clients());
    for measured in &report.clients {
        let lost = set(&["a child's program without environment", "after exec without environment"]);
        assert_eq!(with(measured, Verdict::Exceeded), lost, "{}", report.text());
        assert_eq!(with(measured, Verdict::Kept), set(&[]), "{}", report.text());
    }
}

#[test]
fn a_limiter_that_limits_nothing_is_caught_whatever_functions_it_has() {
    let report = report("faulty", &Libraries::replacing(Some("LIMITS_NOTHING")), &c_clients());
    for measured in &report.clients {
        assert_eq!(with(measured, Verdict::Held), set(&[]), "{}", report.text());
        assert_eq!(measured.functions.len(), 2, "its functions are in the driver's place");
    }
}

#[test]
fn a_limiter_that_forgets_allocations_in_the_order_of_a_stream_is_caught() {
    let report = report("faulty", &Libraries::replacing(Some("FORGETS_ASYNC")), &c_clients());
    for measured in &report.clients {
        let mut expected =
            set(&["async", "async-per-thread", "pool", "all of these together", "two processes, async"]);
        if measured.client == CUDA[2].1 {
            expected.insert("managed-pool");
        }
        assert_eq!(with(measured, Verdict::Exceeded), expected, "{}", report.text());
    }
}

#[test]
fn a_limiter_that_misses_the_look_up_of_newer_programs_holds_older_ones_alone() {
    let report = report("faulty", &Libraries::replacing(Some("MISSES_GET_PROC_ADDRESS")), &c_clients());
    let held: Vec<_> =
        report.clients.iter().map(|measured| with(measured, Verdict::Exceeded).is_empty()).collect();
    assert_eq!(held, [true, false, false], "{}", report.text());
    assert_eq!(with(&report.clients[1], Verdict::Held), set(&[]));
}

#[test]
fn a_limiter_that_counts_each_process_by_itself_is_caught() {
    let report = report("faulty", &Libraries::replacing(Some("COUNTS_EACH_PROCESS")), &c_clients());
    let together = set(&[
        "a child's program",
        "a child's program without environment",
        "a fork",
        "two processes",
        "two processes, async",
    ]);
    for measured in &report.clients {
        assert_eq!(with(measured, Verdict::Exceeded), together, "{}", report.text());
    }
}

#[test]
fn a_limiter_that_takes_nothing_back_is_caught() {
    let freed = report("faulty", &Libraries::replacing(Some("KEEPS_WHAT_IS_FREED")), &c_clients());
    for measured in &freed.clients {
        let expected: BTreeSet<_> =
            ALLOCATORS.into_iter().filter(|name| !with(measured, Verdict::Absent).contains(name)).collect();
        assert_eq!(with(measured, Verdict::Kept), expected, "{}", freed.text());
    }
    // One client: for the next one nothing would be left.
    let killed = report("faulty", &Libraries::replacing(Some("KEEPS_THE_DEAD")), &c_clients()[1..2]);
    let kept = with(&killed.clients[0], Verdict::Kept);
    assert!(kept.contains("after a killed process") && !kept.contains("malloc"), "{}", killed.text());
}

#[test]
fn without_a_driver_the_report_says_what_is_missing() {
    let libraries = Libraries::replacing(None);
    std::fs::remove_file(libraries.path("libcuda-driver.so.1")).unwrap();
    let report = report("none", &libraries, &c_clients());
    assert!(!report.holds());
    assert!(report.text().contains("not measured: libcuda.so.1 answered 500"), "{}", report.text());
}

/// Runs on a machine with a card alone, which should be idle.
#[test]
fn on_a_card_without_isolation_every_probe_exceeds() {
    let setting = Setting { limit_mib: 256, environment: Vec::new() };
    let measured = measure(&c_clients()[1], &setting);
    if let Some(error) = measured.error {
        gpu_migrate_tests::skipped(&format!("no card: {error}"));
        return;
    }
    assert_eq!(with(&measured, Verdict::Held), set(&[]), "{measured:?}");
}

/// The interpreters that have NVIDIA's bindings.
fn bindings() -> Option<Vec<PathBuf>> {
    let cache = gpu_migrate_tests::cache()?;
    let all = BINDINGS.map(|version| cache.join(format!("cuda-bindings-{version}/bin/python3")));
    all.iter().all(|interpreter| interpreter.exists()).then(|| all.into())
}

/// `docs/isolation-measured.md` has the table of this run, which writes it with `GPU_MIGRATE_WRITE_DOCUMENTS=1`.
#[test]
fn the_document_has_the_table_of_every_client_and_library() {
    let Some(interpreters) = bindings() else {
        let [twelve, thirteen] = BINDINGS;
        gpu_migrate_tests::skipped(&format!(
            "cuda-bindings {twelve} and {thirteen} are not below the cache: see .ci/run"
        ));
        return;
    };
    let cases = [
        ("none: the stand-in alone", Libraries::driver()),
        ("a limiter in place of `libcuda.so.1`", Libraries::replacing(None)),
        ("the same by `LD_PRELOAD`", Libraries::preloaded()),
        ("a limiter that limits nothing", Libraries::replacing(Some("LIMITS_NOTHING"))),
        ("a limiter that forgets asynchronous allocations", Libraries::replacing(Some("FORGETS_ASYNC"))),
        ("a limiter without `cuGetProcAddress`", Libraries::replacing(Some("MISSES_GET_PROC_ADDRESS"))),
    ];
    let script = here().join("client/client.py");
    let mut reports = Vec::new();
    for (name, libraries) in &cases {
        let mut clients = c_clients();
        // They take a hundred times as long to start, and are for what the C clients cannot show: that programs of others agree.
        let with_python = ["in place", "nothing", "asynchronous"].iter().any(|word| name.contains(word));
        for interpreter in interpreters.iter().filter(|_| with_python) {
            clients.push(Client::of_python(interpreter, &script, &libraries.setting()).unwrap());
        }
        reports.push(report(name, libraries, &clients));
    }
    for report in &reports[1..2] {
        assert!(report.holds(), "{}", report.text());
    }
    let path = here().join("../docs/isolation-measured.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (prose, _) = text.split_once("| limited by |").unwrap();
    let mut now = prose.to_owned();
    write!(now, "{}", table(&reports)).unwrap();
    if std::env::var_os("GPU_MIGRATE_WRITE_DOCUMENTS").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    assert!(text == now || std::fs::read_to_string(&path).unwrap() == now, "the table of now:\n{now}");
}
