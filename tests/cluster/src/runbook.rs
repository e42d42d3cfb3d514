//! The commands of the documents, typed as they stand there.
//!
//! `commands.tsv` says of every command in a `sh` block of the documents by which test it is really run; a test holds that
//! list against the documents. A scenario opens a [`Runbook`] with its own name, runs its commands, and ends with
//! [`Runbook::finish`], which fails if one was left out: so no command stands on the list that nobody runs.

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

/// Who runs, and the command, with a tab between.
const COMMANDS: &str = include_str!("../commands.tsv");
/// No command of the documents takes longer, waiting for rollouts included.
const LONG: Duration = Duration::from_secs(120);

/// A scenario's commands, and the place where they are typed.
#[derive(Debug)]
pub struct Runbook {
    todo: BTreeSet<&'static str>,
    listed: BTreeSet<&'static str>,
    folder: PathBuf,
    path: OsString,
    kubeconfig: PathBuf,
    /// Whether the pods of our programs are followed while a command runs.
    pub follow: bool,
}

/// How a command ended.
#[derive(Clone, Debug)]
pub struct CommandOutput {
    /// Its exit status.
    pub status: i32,
    /// What it printed, errors included.
    pub text: String,
}

impl Runbook {
    /// The commands that `commands.tsv` gives to a scenario. They are typed in a folder that has `deploy` and `examples` of
    /// the repository, as administrator of the cluster.
    ///
    /// # Errors
    /// If the folder cannot be made or our programs cannot be built.
    pub fn open(cluster: &Cluster, scenario: &str) -> Result<Self> {
        let listed: BTreeSet<&str> = COMMANDS
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .filter_map(|(who, command)| (who == scenario).then_some(command))
            .collect();
        let folder = cluster.setup.layout.file("book");
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
            todo: listed.clone(),
            listed,
            folder,
            path,
            kubeconfig: cluster.setup.admin.clone(),
            follow: true,
        })
    }

    /// Writes a file that a command names.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn file(&self, name: &str, content: &str) -> Result<()> {
        fs::write(self.folder.join(name), content).with_context(|| format!("cannot write {name}"))
    }

    /// Runs a command of the list that has to end well.
    ///
    /// # Errors
    /// If it does not, or is not on the list.
    pub async fn run(&mut self, cluster: &mut Cluster, command: &str) -> Result<String> {
        self.run_with_status(cluster, command, &[0]).await
    }

    /// Runs a command of the list that has to end with one of these.
    ///
    /// # Errors
    /// If it ends with another, or is not on the list.
    pub async fn run_with_status(
        &mut self,
        cluster: &mut Cluster,
        command: &str,
        status: &[i32],
    ) -> Result<String> {
        ensure!(self.listed.contains(command), "commands.tsv does not give this scenario {command:?}");
        let said = self.run_unlisted(cluster, command).await?;
        ensure!(
            status.contains(&said.status),
            "{command}\nended with {}, not {status:?}:\n{}",
            said.status,
            said.text
        );
        self.todo.remove(command);
        Ok(said.text)
    }

    /// Runs a command that the documents do not have, whatever its end. The pods of our programs are followed meanwhile, where
    /// `follow` says so: a command may wait for them.
    ///
    /// # Errors
    /// If it cannot be started, takes too long, or a program of ours fails meanwhile.
    pub async fn run_unlisted(&self, cluster: &mut Cluster, command: &str) -> Result<CommandOutput> {
        let log = self.folder.join("said");
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
            if begin.elapsed() > LONG {
                bail!("{command}\nhas not ended after {LONG:?}:\n{}", fs::read_to_string(&log)?);
            }
        };
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        eprintln!("    $ {command}   ({:.1?}, status {})", begin.elapsed(), status.code().unwrap_or(-1));
        Ok(CommandOutput { status: status.code().unwrap_or(-1), text })
    }

    /// Fails if a command of the list was not run.
    ///
    /// # Errors
    /// With those commands.
    pub fn finish(self) -> Result<()> {
        ensure!(
            self.todo.is_empty(),
            "commands.tsv gives these to this scenario, which did not run them: {:#?}",
            self.todo
        );
        Ok(())
    }
}
