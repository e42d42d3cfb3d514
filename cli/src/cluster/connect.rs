//! Connecting to a cluster, as kubectl does.

use super::Snapshot;
use crate::complete;
use crate::manifest::{documents, expand, read_inputs};
use anyhow::Context as _;
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Which cluster.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Cluster")]
pub struct ReachArgs {
    /// Kubeconfig; default: $KUBECONFIG, ~/.kube/config, the pod's service account.
    #[arg(long, env = "GPU_MIGRATE_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig.
    #[arg(long, value_name = "NAME", add = complete::contexts())]
    pub context: Option<String>,
}

/// Which cluster, or files that stand for one.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Which cluster.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// Read these files instead of a cluster (output of kubectl get -o yaml); `-` is stdin.
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["kubeconfig", "context"])]
    pub from: Vec<PathBuf>,
}

impl ReachArgs {
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = match &self.kubeconfig {
            Some(path) => {
                let file =
                    Kubeconfig::read_from(path).with_context(|| format!("kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options).await?
            }
            None if self.context.is_some() => Config::from_kubeconfig(&options).await?,
            None => Config::infer().await.context("no cluster configured: set KUBECONFIG or --kubeconfig")?,
        };
        // A command speaks to one cluster.
        let _ = SERVER.set(config.cluster_url.to_string().trim_end_matches('/').to_owned());
        Ok(Client::try_from(config)?)
    }
}

static SERVER: OnceLock<String> = OnceLock::new();

/// The address of the API server that this command speaks to, for its errors.
#[must_use]
pub fn server() -> Option<&'static str> {
    SERVER.get().map(String::as_str)
}

impl ClusterArgs {
    /// The snapshot with the configuration of kubelets and API server.
    pub(crate) async fn snapshot_with_settings(&self) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.snapshot().await?;
        if self.from.is_empty() {
            snapshot.add_settings(&self.reach.client().await?).await;
        }
        Ok(snapshot)
    }

    /// The snapshot of the cluster or of the files.
    pub(crate) async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        if self.from.is_empty() {
            return Snapshot::of_cluster(&self.reach.client().await?).await;
        }
        self.snapshot_of_files()
    }

    /// The snapshot of the files.
    pub(crate) fn snapshot_of_files(&self) -> anyhow::Result<Snapshot> {
        let (inputs, errors) = read_inputs(&self.from, false, &mut io::stdin());
        if let Some(error) = errors.into_iter().next() {
            return Err(error.into());
        }
        let mut objects = Vec::new();
        for input in &inputs {
            let (found, broken) = documents(input);
            if let Some(error) = broken.into_iter().next() {
                return Err(error.into());
            }
            let (manifests, wrong) = expand(found);
            if let Some(error) = wrong.into_iter().next() {
                return Err(error.into());
            }
            objects.extend(manifests);
        }
        Snapshot::of_objects(objects)
    }
}

/// Runs a command on a single-threaded runtime.
pub(crate) fn runtime<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    // The only failure is that a provider is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
