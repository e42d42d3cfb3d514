//! Runs the commands of the documents, verbatim.
//!
//! `commands.tsv` names, for every command in a `sh` block of the documents, the test that runs it; a test holds that
//! list against the documents. A scenario opens a [`Runbook`] with its own name, runs its commands, and ends with
//! [`Runbook::finish`], which fails if one was not run: so every command on the list is run.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{binaries, cluster::Cluster};

/// One line a command: the test that runs it, a tab, the command.
const COMMANDS: &str = include_str!("../commands.tsv");
/// No command of the documents takes longer, waiting for rollouts included.
const LIMIT: Duration = Duration::from_secs(120);

/// A scenario's commands, and the environment that they run in.
#[derive(Debug)]
pub struct Runbook {
    not_run: BTreeSet<&'static str>,
    listed: BTreeSet<&'static str>,
    folder: PathBuf,
    path: OsString,
    kubeconfig: PathBuf,
    /// Whether the pods of our programs are followed while a command runs.
    pub follow: bool,
}

/// What a command printed, and how it ended.
#[derive(Clone, Debug)]
pub struct CommandOutput {
    pub status: i32,
    pub text: String,
}

impl Runbook {
    /// The commands that `commands.tsv` gives to a scenario. They run in a folder that has `deploy` and `examples` of
    /// the repository, as administrator of the cluster.
    pub fn open(cluster: &Cluster, scenario: &str) -> Result<Self> {
        let listed: BTreeSet<&str> = COMMANDS
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .filter_map(|(test, command)| (test == scenario).then_some(command))
            .collect();
        let folder = cluster.setup.layout.file("runbook");
        fs::create_dir_all(&folder)?;
        let root = crate::package_folder().join("../..").canonicalize()?;
        for name in ["deploy", "examples"] {
            let link = folder.join(name);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(root.join(name), link)?;
        }
        let kubectl = cluster.setup.binaries.kubectl.parent().context("a file has a folder")?;
        let helm = binaries::helm()?;
        let helm = helm.parent().context("a file has a folder")?;
        let path = std::env::join_paths(
            [binaries::ours()?, kubectl.to_owned(), helm.to_owned()]
                .into_iter()
                .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
        )?;
        Ok(Self {
            not_run: listed.clone(),
            listed,
            folder,
            path,
            kubeconfig: cluster.setup.admin.clone(),
            follow: true,
        })
    }

    /// Writes a file that a command names.
    pub fn file(&self, name: &str, content: &str) -> Result<()> {
        fs::write(self.folder.join(name), content).with_context(|| format!("cannot write {name}"))
    }

    /// Runs a command of the list that must succeed.
    pub async fn run(&mut self, cluster: &mut Cluster, command: &str) -> Result<String> {
        self.run_with_status(cluster, command, &[0]).await
    }

    /// Runs a command of the list that must end with one of these statuses.
    pub async fn run_with_status(
        &mut self,
        cluster: &mut Cluster,
        command: &str,
        status: &[i32],
    ) -> Result<String> {
        ensure!(self.listed.contains(command), "commands.tsv does not give this scenario {command:?}");
        let output = self.run_unlisted(cluster, command).await?;
        ensure!(
            status.contains(&output.status),
            "{command}\nended with {}, not {status:?}:\n{}",
            output.status,
            output.text
        );
        self.not_run.remove(command);
        Ok(output.text)
    }

    /// Runs a command that is not in the documents, whatever its status. The pods of our programs are followed meanwhile, where
    /// `follow` says so: a command may wait for them.
    pub async fn run_unlisted(&self, cluster: &mut Cluster, command: &str) -> Result<CommandOutput> {
        let log = self.folder.join("output");
        let file = File::create(&log)?;
        let mut child = tokio::process::Command::new("bash")
            .args(["-euo", "pipefail", "-c", command])
            .current_dir(&self.folder)
            .env("PATH", &self.path)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &self.folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {command}"))?;
        let begin = Instant::now();
        let status = loop {
            if self.follow {
                cluster.sync_pod_programs().await.with_context(|| format!("while {command:?} runs"))?;
            }
            cluster.check()?;
            if let Ok(status) = tokio::time::timeout(Duration::from_millis(50), child.wait()).await {
                break status?;
            }
            if begin.elapsed() > LIMIT {
                bail!("{command}\nhas not ended after {LIMIT:?}:\n{}", fs::read_to_string(&log)?);
            }
        };
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        eprintln!("    $ {command}   ({:.1?}, status {})", begin.elapsed(), status.code().unwrap_or(-1));
        Ok(CommandOutput { status: status.code().unwrap_or(-1), text })
    }

    /// Fails if a command of the list was not run.
    pub fn finish(self) -> Result<()> {
        ensure!(
            self.not_run.is_empty(),
            "commands.tsv gives these to this scenario, which did not run them: {:#?}",
            self.not_run
        );
        Ok(())
    }
}
