//! The command line.

use clap::Parser;
use gpu_migrate_runtime::LogFormat;
use std::path::PathBuf;

/// Operator of gpu-migrate: labels nodes by GPUConfig, rolls projects out in waves by GPUMigration.
///
/// Of several replicas the leader acts, which holds the Lease `gpu-migrate-operator`.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu-migrate-operator", version)]
pub struct Args {
    /// Kubeconfig; default: $KUBECONFIG, ~/.kube/config, the pod's service account.
    #[arg(long, env = "GPU_MIGRATE_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, env = "GPU_MIGRATE_NAMESPACE", default_value = "gpu-migrate-system")]
    pub namespace: String,
    /// Identity of this replica in the Lease [default: host name and process ID].
    #[arg(long, env = "GPU_MIGRATE_IDENTITY")]
    pub identity: Option<String>,
    /// Address of /livez, /readyz and /metrics (HTTP); empty for none.
    #[arg(long, env = "GPU_MIGRATE_METRICS_BIND", default_value = "[::]:9405")]
    pub metrics_bind: String,
    /// Address of the status page (HTTP); empty for none. Plain, and with tokens of users: keep it on loopback, for `kubectl port-forward`,
    /// or put a proxy with TLS before it.
    #[arg(long, env = "GPU_MIGRATE_STATUS_BIND", default_value = "", value_name = "ADDR")]
    pub status_bind: String,
    /// Show the status page to everybody who reaches it, instead of to those who may list GPUShadows and GPUMigrations by their token.
    #[arg(long, env = "GPU_MIGRATE_STATUS_WITHOUT_TOKEN", requires = "status_bind")]
    pub status_without_token: bool,
    /// Lease duration in seconds: another replica takes over when it was not renewed for so long.
    #[arg(long, env = "GPU_MIGRATE_LEASE_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(5..=300))]
    pub lease_seconds: u64,
    /// CAs of a Prometheus that gates query over https, PEM; default: those of the system.
    #[arg(long, env = "GPU_MIGRATE_PROMETHEUS_CA_FILE", value_name = "FILE")]
    pub prometheus_ca_file: Option<PathBuf>,
    /// Bearer token for that Prometheus; it is not sent over plain http.
    #[arg(long, env = "GPU_MIGRATE_PROMETHEUS_TOKEN_FILE", value_name = "FILE")]
    pub prometheus_token_file: Option<PathBuf>,
    /// Milliseconds before a failed reconcile is retried; looks at a wave in progress are 2.5 times as far apart, others 15 times. For tests
    /// and the demo.
    #[arg(long, hide = true, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub interval_milliseconds: u64,
    /// Form of the log.
    #[arg(long, env = "GPU_MIGRATE_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
