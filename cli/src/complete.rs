//! Completion in the shell, down to names of the cluster that the line is about.

use crate::args;
use crate::cluster::{ReachArgs, runtime};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use gpu_migrate_model::crd::{GPUMigration, GPUShadow};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams};
use kube::config::Kubeconfig;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Set by the script in the shell: answer with candidates instead of running.
const VARIABLE: &str = "GPU_MIGRATE_COMPLETE";
/// Somebody waits with a finger on Tab.
const PATIENCE: Duration = Duration::from_secs(2);
/// More names than this help nobody.
const MOST: u32 = 500;

/// Answers the shell and exits, where this process was called for that.
pub fn answer() {
    CompleteEnv::with_factory(|| args::command(None)).var(VARIABLE).complete();
}

/// What a shell must run to complete `gpu-migrate`.
///
/// # Errors
/// When `out` cannot be written.
pub(crate) fn script(shell: clap_complete::Shell, out: &mut dyn Write) -> io::Result<()> {
    let shells = Shells::builtins();
    let shell =
        shells.completer(&shell.to_string()).ok_or_else(|| io::Error::other("a shell without completion"))?;
    shell.write_registration(VARIABLE, "gpu-migrate", "gpu-migrate", "gpu-migrate", out)
}

/// Names of policies.
pub(crate) fn policies() -> ArgValueCandidates {
    ArgValueCandidates::new(names::<GPUMigration>)
}

/// Names of nodes that report their cards.
pub(crate) fn nodes() -> ArgValueCandidates {
    ArgValueCandidates::new(names::<GPUShadow>)
}

/// Names of namespaces.
pub(crate) fn namespaces() -> ArgValueCandidates {
    ArgValueCandidates::new(names::<Namespace>)
}

/// Contexts of the kubeconfig.
pub(crate) fn contexts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let file = match reach(std::env::args()).kubeconfig {
            Some(path) => Kubeconfig::read_from(path),
            None => Kubeconfig::read(),
        };
        let contexts = file.map(|file| file.contexts).unwrap_or_default();
        contexts.into_iter().map(|context| CompletionCandidate::new(context.name)).collect()
    })
}

/// Names of all objects of a kind; none where the cluster does not say in time.
fn names<K>() -> Vec<CompletionCandidate>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let asked = async {
        let client = reach(std::env::args()).client().await?;
        let params = ListParams::default().limit(MOST);
        Ok(Api::<K>::all(client).list_metadata(&params).await?)
    };
    let found = runtime(async { tokio::time::timeout(PATIENCE, asked).await? });
    let found = found.map(|list| list.items).unwrap_or_default();
    found.into_iter().map(|object| CompletionCandidate::new(object.name_any())).collect()
}

/// Which cluster a line is about, as far as it is written.
fn reach(line: impl Iterator<Item = String>) -> ReachArgs {
    let mut reach = ReachArgs {
        kubeconfig: std::env::var_os("GPU_MIGRATE_KUBECONFIG").map(PathBuf::from),
        context: None,
    };
    let mut line = line.skip_while(|word| word != "--");
    while let Some(word) = line.next() {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        if !["--context", "--kubeconfig"].contains(&flag.as_str()) {
            continue;
        }
        // bash takes `=` for a word of its own.
        let value = value.or_else(|| line.find(|word| word != "="));
        match flag.as_str() {
            "--context" => reach.context = value,
            _ => reach.kubeconfig = value.map(PathBuf::from),
        }
    }
    reach
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_asked_of_the_cluster_that_the_line_names() {
        for line in [
            "--context two --kubeconfig /k",
            "--context=two --kubeconfig=/k",
            "--context = two --kubeconfig = /k",
        ] {
            let words = format!("gpu-migrate -- gpu-migrate status {line}");
            let reach = reach(words.split(' ').map(str::to_owned));
            assert_eq!(
                (reach.context.as_deref(), reach.kubeconfig),
                (Some("two"), Some(PathBuf::from("/k"))),
                "{line}"
            );
        }
        assert_eq!(reach("x --context no".split(' ').map(str::to_owned)).context, None, "not of the line");
    }
}
