//! Which command takes which of kubectl's flags: where one makes sense it is taken, elsewhere the command line is wrong (status 2).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use gpu_migrate_cli::args;

/// The flags that are asked about.
const FLAGS: [&str; 12] = [
    "-o table",
    "-o json",
    "-o yaml",
    "-o wide",
    "-o name",
    "--no-headers",
    "--watch",
    "--context c",
    "--kubeconfig k",
    "-n x",
    "--namespace x",
    "--from f",
];

#[test]
fn each_command_takes_the_flags_that_make_sense_for_it() {
    let table = [
        ("plan", "-o json, -o yaml, -o name, --no-headers, --context c, --kubeconfig k, -n x, --namespace x"),
        ("plan -f f", "-o json, -o yaml, -o name, --no-headers, -n x, --namespace x"),
        ("simulate --snapshot s", "-o table, -o json"),
        ("preflight", "-o table, -o json, -o yaml, --context c, --kubeconfig k, --from f"),
        (
            "status",
            "-o table, -o json, -o yaml, -o wide, -o name, --no-headers, --watch, --context c, --kubeconfig k, --from f",
        ),
        (
            "status --watch",
            "-o table, -o json, -o yaml, -o wide, -o name, --no-headers, --context c, --kubeconfig k",
        ),
        (
            "top",
            "-o table, -o json, -o yaml, --no-headers, --context c, --kubeconfig k, -n x, --namespace x, --from f",
        ),
        (
            "suggest --recording r",
            "-o table, -o json, -o yaml, --no-headers, --context c, --kubeconfig k, -n x, --namespace x, --from f",
        ),
        (
            "top --record r",
            "-o table, -o json, -o yaml, --no-headers, --context c, --kubeconfig k, -n x, --namespace x",
        ),
        ("rollout start p", "-o table, -o json, -o yaml, -o name, --context c, --kubeconfig k"),
        ("cordon-card n 0", "-o table, -o json, -o yaml, -o name, --context c, --kubeconfig k"),
        (
            "quota translate",
            "-o table, -o json, -o yaml, -o name, --no-headers, --context c, --kubeconfig k, -n x, --namespace x, --from f",
        ),
        (
            "quota translate --apply",
            "-o table, -o json, -o yaml, -o name, --no-headers, --context c, --kubeconfig k, -n x, --namespace x",
        ),
        ("verify", "-o table, -o json, -o yaml, --context c, --kubeconfig k, --from f"),
        ("verify --install", "-o table, -o json, -o yaml, --context c, --kubeconfig k, -n x, --namespace x"),
        ("verify isolation", "-o table, -o json, -o yaml"),
        ("verify isolation --job", "-o table, -o json, -o yaml, -n x, --namespace x"),
        ("uninstall", "-o table, -o json, -o yaml, --context c, --kubeconfig k, -n x, --namespace x"),
        ("crds", ""),
        ("completion bash", ""),
        ("man d", ""),
    ];
    for (command, expected) in table {
        let taken = FLAGS.iter().filter(|flag| {
            let line = format!("gpu-migrate {command} {flag}");
            match args::command(None).try_get_matches_from(line.split(' ')) {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error.exit_code(), 2, "{line}");
                    false
                }
            }
        });
        assert_eq!(taken.copied().collect::<Vec<_>>().join(", "), expected, "{command}");
    }
}
