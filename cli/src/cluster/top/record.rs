//! `top --record`: appends what containers use to a file, for days and without a terminal.

use super::{Shown, projects_of_pods, read};
use crate::args::TopArgs;
use crate::cluster::{Snapshot, Usage, warn};
use crate::suggest::recording::Sample;
use anyhow::Context as _;
use gpu_migrate_model::usage::UseKind;
use jiff::{Timestamp, Unit};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file of a recording.
#[derive(Debug)]
pub(super) struct Recorder {
    path: PathBuf,
    file: File,
    shown: Shown,
}

impl Recorder {
    /// Opens the file, or makes it.
    pub(super) fn open(path: &Path, shown: &Shown) -> anyhow::Result<Self> {
        let file = open(path).with_context(|| format!("recording {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file, shown: shown.clone() })
    }

    /// Appends what is used now.
    pub(super) fn append(&self, snapshot: &Snapshot, usage: &Usage) -> anyhow::Result<()> {
        // Whole seconds are enough, and shorter.
        let now = Timestamp::now();
        let samples = samples(now.round(Unit::Second).unwrap_or(now), snapshot, usage, &self.shown);
        let mut text = String::new();
        for sample in samples {
            text += &serde_json::to_string(&sample)?;
            text.push('\n');
        }
        // At once, so that a recorder that is killed leaves at most one broken line.
        (&self.file).write_all(text.as_bytes()).with_context(|| format!("recording {}", self.path.display()))
    }
}

/// A line that a killed recorder did not finish is ended.
fn open(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let mut last = [b'\n'];
    if file.metadata()?.is_file() && file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// A sample of each container with a card that `top` would show.
fn samples(time: Timestamp, snapshot: &Snapshot, usage: &Usage, shown: &Shown) -> Vec<Sample> {
    let projects = projects_of_pods(snapshot);
    let mut samples = Vec::new();
    for (node, of_node) in &usage.nodes {
        for card in &of_node.cards {
            for container in card.containers.iter().filter(|one| one.kind != UseKind::None) {
                let pod = format!("{}/{}", container.namespace, container.pod);
                let project = projects.get(&pod).map(String::as_str).unwrap_or_default();
                if container.pod.is_empty() || !shown.shows(&pod, &[&container.container, node, project]) {
                    continue;
                }
                samples.push(Sample {
                    time,
                    node: node.clone(),
                    project: project.to_owned(),
                    card: card.uuid.clone(),
                    model: card.model.clone(),
                    card_memory_bytes: card.memory_bytes,
                    container: container.clone(),
                });
            }
        }
    }
    samples
}

/// Records until it is told to stop. What fails once the first look has succeeded is said, and tried again: an API server that is away
/// for a while must not end a recording of days. A file that cannot be written ends it.
pub(super) async fn run(args: &TopArgs, interval: Duration, recorder: &Recorder) -> anyhow::Result<()> {
    let client = args.look.cluster.reach.client().await?;
    let mut stopped = std::pin::pin!(stopped());
    let (mut succeeded, mut said) = (false, None);
    loop {
        let next = tokio::time::Instant::now() + interval;
        let looked = tokio::select! {
            looked = read(&client) => looked,
            () = &mut stopped => return Ok(()),
        };
        let why = match looked {
            Ok((snapshot, usage)) => {
                succeeded = true;
                recorder.append(&snapshot, &usage)?;
                usage.missing
            }
            Err(error) if !succeeded => return Err(error),
            Err(error) => Some(crate::errors::sentence(&error, crate::cluster::server())),
        };
        if said != why {
            if let Some(why) = &why {
                warn(&mut anstream::stderr(), why)?;
            }
            said = why;
        }
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = &mut stopped => return Ok(()),
        }
    }
}

/// SIGINT or SIGTERM.
async fn stopped() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cluster, everything, usage};
    use super::*;
    use crate::args::{TopBy, TopSort};

    #[test]
    fn every_container_that_is_shown_is_a_line() {
        let time = Timestamp::from_second(1_800_000_000).unwrap();
        let mut shown = everything(TopBy::Container, TopSort::Cores);
        let all = samples(time, &cluster(), &usage(), &shown);
        let rows =
            all.iter().map(|one| (one.container.pod.as_str(), one.project.as_str(), one.node.as_str()));
        assert_eq!(rows.collect::<Vec<_>>(), [("big", "vision", "gpu-01"), ("small", "search", "gpu-01")]);
        assert_eq!((all[0].card_memory_bytes, all[0].container.utilization_percent), (24 << 30, Some(5)));
        shown.filter = "search".into();
        assert_eq!(samples(time, &cluster(), &usage(), &shown).len(), 1);
        shown.namespace = Some("other".into());
        assert!(samples(time, &cluster(), &usage(), &shown).is_empty());
    }

    #[test]
    fn a_recording_goes_on_behind_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("use.jsonl");
        let shown = everything(TopBy::Container, TopSort::Cores);
        let append = || Recorder::open(&path, &shown).unwrap().append(&cluster(), &usage()).unwrap();
        append();
        append();
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 4, "{whole}");
        // A recorder that was killed in the middle of a line.
        std::fs::write(&path, &whole[..whole.len() - 20]).unwrap();
        append();
        let text = std::fs::read_to_string(&path).unwrap();
        let readable = text.lines().filter(|line| serde_json::from_str::<Sample>(line).is_ok()).count();
        assert_eq!((text.lines().count(), readable), (6, 5), "{text}");
        let error = Recorder::open(&folder.path().join("no/such"), &shown).unwrap_err();
        assert!(format!("{error:#}").contains("no/such"), "{error:#}");
    }
}
