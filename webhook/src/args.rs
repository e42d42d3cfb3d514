//! The command line.

use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser};
use gpu_migrate_runtime::LogFormat;
use gpu_migrate_runtime::trace::TraceArgs;

use crate::configuration::Address;

/// Mutating admission webhook: rewrites whole-card GPU requests into shares, project by project.
///
/// With --policy-file it needs no cluster. Without, it watches GPUMigrations and Namespaces.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu-migrate-webhook", version)]
pub struct Args {
    /// Policies from a YAML stream of GPUMigrations and Namespaces instead of from the cluster; read again on change.
    #[arg(long, env = "GPU_MIGRATE_POLICY_FILE", value_name = "FILE")]
    pub policy_file: Option<PathBuf>,
    /// Address to serve the API server on, with TLS.
    #[arg(long, env = "GPU_MIGRATE_BIND", default_value = "[::]:9443")]
    pub bind: SocketAddr,
    /// Address of /livez, /readyz and /metrics, without TLS; empty for none.
    #[arg(long, env = "GPU_MIGRATE_METRICS_BIND", default_value = "[::]:9402")]
    pub metrics_bind: String,
    /// Kubeconfig; default: $KUBECONFIG, ~/.kube/config, the pod's service account.
    #[arg(long, env = "GPU_MIGRATE_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of gpu-migrate: holds the CA's Secret; its pods are never changed.
    #[arg(long, env = "GPU_MIGRATE_NAMESPACE", default_value = "gpu-migrate-system")]
    pub namespace: String,
    /// Name of this replica.
    #[arg(long, env = "GPU_MIGRATE_IDENTITY")]
    pub identity: Option<String>,
    /// Certificates.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// The webhook configuration.
    #[command(flatten)]
    pub registration: RegistrationArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Form of the log.
    #[arg(long, env = "GPU_MIGRATE_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Where certificates come from.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Certificates")]
pub struct TlsArgs {
    /// Folder with tls.crt and tls.key (and ca.crt), watched for changes. Without a tls.crt in it, a self-signed CA is
    /// created and kept there.
    #[arg(long, env = "GPU_MIGRATE_TLS_DIR", value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Secret, in the namespace of gpu-migrate, with the CA that the replicas share; used where there is no --tls-dir.
    #[arg(long, env = "GPU_MIGRATE_TLS_SECRET", default_value = "gpu-migrate-webhook-ca")]
    pub tls_secret: String,
    /// Further DNS names and IP addresses for the certificate.
    #[arg(long = "tls-name", env = "GPU_MIGRATE_TLS_NAMES", value_delimiter = ',', value_name = "NAME")]
    pub tls_names: Vec<String>,
    /// How long a serving certificate lives; renewed at two thirds.
    #[arg(long, env = "GPU_MIGRATE_CERTIFICATE_LIFETIME", default_value = "168h", value_parser = duration)]
    pub certificate_lifetime: Duration,
    /// How long the CA lives; renewed at two thirds, with both CAs in the bundle.
    #[arg(long, env = "GPU_MIGRATE_CA_LIFETIME", default_value = "8760h", value_parser = duration)]
    pub ca_lifetime: Duration,
    /// Require a client certificate signed by a CA in this PEM file.
    #[arg(long, env = "GPU_MIGRATE_CLIENT_CA_FILE", value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Names that client certificates may carry; default: any.
    #[arg(
        long = "client-name",
        env = "GPU_MIGRATE_CLIENT_NAMES",
        value_delimiter = ',',
        requires = "client_ca_file",
        value_name = "NAME"
    )]
    pub client_names: Vec<String>,
}

/// Whether and how the webhook registers itself.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "WebhookConfiguration")]
pub struct RegistrationArgs {
    /// Create and maintain the MutatingWebhookConfiguration.
    #[arg(long, env = "GPU_MIGRATE_REGISTER")]
    pub register: bool,
    /// Only keep the caBundle of a MutatingWebhookConfiguration that exists already, such as the chart's.
    #[arg(long, env = "GPU_MIGRATE_INJECT_CA", conflicts_with = "register")]
    pub inject_ca: bool,
    /// Service in front of the replicas: NAMESPACE/NAME or NAMESPACE/NAME:PORT.
    #[arg(long, env = "GPU_MIGRATE_SERVICE", value_parser = service, value_name = "NAMESPACE/NAME", conflicts_with = "service_url")]
    pub service: Option<Address>,
    /// Address for an API server outside the cluster network.
    #[arg(long, env = "GPU_MIGRATE_SERVICE_URL", value_name = "URL")]
    pub service_url: Option<String>,
    /// Annotate pods that keep their whole cards with the outcome, gpu-migrate.io/reviewed, by which the backstop (a
    /// ValidatingAdmissionPolicy) tells them from pods that were not reviewed.
    #[arg(long, env = "GPU_MIGRATE_MARK_REVIEWED")]
    pub mark_reviewed: bool,
    /// How long the API server waits for an answer, seconds.
    #[arg(long, env = "GPU_MIGRATE_TIMEOUT_SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=30))]
    pub timeout_seconds: u8,
}

/// What is held back.
#[derive(Clone, Debug, ClapArgs)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// MiB of memory for bodies that are being read or reviewed, at most half of it for one address; more are answered with
    /// 503. To be well below the container's memory limit.
    #[arg(long, env = "GPU_MIGRATE_MAX_BODY_MEMORY", default_value_t = 32, value_parser = clap::value_parser!(u16).range(16..))]
    pub max_body_memory: u16,
    /// Open connections, at most half of them from one address; for one more, that which has been idle longest is closed.
    #[arg(long, env = "GPU_MIGRATE_MAX_CONNECTIONS", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(2..))]
    pub max_connections: u16,
    /// Threads that answer reviews; a review takes tens of microseconds.
    #[arg(long, env = "GPU_MIGRATE_WORKER_THREADS", default_value = "2")]
    pub worker_threads: NonZeroU8,
    /// How long to accept requests after SIGTERM, while endpoints propagate.
    #[arg(long, env = "GPU_MIGRATE_DRAIN_DELAY", default_value = "5s", value_parser = duration)]
    pub drain_delay: Duration,
    /// How long connections may take to finish after that.
    #[arg(long, env = "GPU_MIGRATE_DRAIN_TIMEOUT", default_value = "15s", value_parser = duration)]
    pub drain_timeout: Duration,
}

fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?}: expected a duration above zero such as 30s, 15m or 168h");
    let parsed: jiff::SignedDuration = text.parse().map_err(|_| wrong())?;
    Duration::try_from(parsed).ok().filter(|duration| !duration.is_zero()).ok_or_else(wrong)
}

fn service(text: &str) -> Result<Address, String> {
    let wrong = || format!("{text:?}: expected NAMESPACE/NAME or NAMESPACE/NAME:PORT");
    let (namespace, rest) = text.split_once('/').ok_or_else(wrong)?;
    let (name, port) = match rest.split_once(':') {
        None => (rest, 443),
        Some((name, port)) => (name, port.parse().map_err(|_| wrong())?),
    };
    if namespace.is_empty() || name.is_empty() || name.contains('/') {
        return Err(wrong());
    }
    Ok(Address::Service { namespace: namespace.into(), name: name.into(), port })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
        let args = Args::parse_from(["gpu-migrate-webhook"]);
        assert_eq!(args.tls.certificate_lifetime, Duration::from_secs(7 * 24 * 3600));
    }

    #[test]
    fn bad_values_say_what_was_expected() {
        for (arguments, expected) in [
            (["--service", "x"], "expected NAMESPACE/NAME"),
            (["--service", "a/b:c"], "expected NAMESPACE/NAME"),
            (["--drain-delay", "soon"], "expected a duration"),
            (["--drain-delay", "0s"], "expected a duration above zero"),
            (["--worker-threads", "0"], "number would be zero"),
            (["--timeout-seconds", "31"], "31 is not in 1..=30"),
        ] {
            let error = Args::try_parse_from(["w", arguments[0], arguments[1]]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
