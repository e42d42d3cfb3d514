//! `gpu-migrate suggest`: ratios for the policies, from what containers used of their cards over days.
//!
//! `recording` or `prometheus` reads → `series`: what each container used → `belongs`: whose it is → `propose`: ratios → `show`.

mod belongs;
mod prometheus;
mod propose;
pub(crate) mod recording;
mod series;
mod show;

use crate::args::{SuggestArgs, SuggestOutput};
use crate::cluster::{self, Snapshot, warn};
use crate::exit::Exit;
use crate::plan::diff::to_yaml;
use crate::style::{fit, window};
use anyhow::{Context as _, bail};
use belongs::Owners;
use gpu_migrate_model::names;
use gpu_migrate_operator::query::Prometheus;
use jiff::SignedDuration;
use propose::{Limits, Suggestions, propose};
use recording::Recording;
use series::Seen;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::PathBuf;
use std::time::Duration;

/// A week of a thousand containers is added up in less.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Some ten thousand containers.
const LARGEST_ANSWER: usize = 64 << 20;

/// Reads, decides, shows.
pub(crate) fn command(args: &SuggestArgs, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<Exit> {
    // Exhaustive, so that a flag that nobody reads does not compile.
    let SuggestArgs {
        recording,
        prometheus,
        token_file,
        ca_file,
        window: back,
        namespace,
        cores_margin,
        memory_margin,
        min_samples,
        min_span,
        cluster: of,
        no_headers,
        output,
    } = args;
    let namespace = namespace.as_deref();
    let seen = match prometheus {
        Some(url) => {
            let server = Prometheus {
                ca_file: ca_file.clone(),
                token_file: token_file.clone(),
                timeout: TIMEOUT,
                largest_answer: LARGEST_ANSWER,
            };
            let seen = cluster::runtime(prometheus::read(&server, url, &back.text, namespace))?;
            if seen.is_empty() {
                bail!(prometheus::nothing(url, &back.text, namespace));
            }
            seen
        }
        None => of_files(recording, namespace, err)?,
    };
    let snapshot = match of.from.is_empty() {
        true => cluster::runtime(async { Snapshot::of_policies(&of.reach.client().await?).await })?,
        false => of.snapshot_of_files()?,
    };
    if let Some(policy) = snapshot.unreadable.first() {
        bail!("{policy}; correct this policy first");
    }
    let Snapshot { migrations, namespaces, pods, .. } = snapshot;
    let owners = Owners::new(migrations, &namespaces, &pods).map_err(anyhow::Error::msg)?;
    let limits = Limits {
        cores_margin: *cores_margin,
        memory_margin: *memory_margin,
        min_samples: *min_samples,
        min_span: min_span.length,
    };
    let suggestions = propose(&seen, &owners, &limits).map_err(anyhow::Error::msg)?;
    show(&suggestions, *output, !no_headers, out)?;
    if *output == SuggestOutput::Yaml {
        show::namespaces(&suggestions, &owners).iter().try_for_each(|object| document(object, out))?;
        // What is in no policy goes beside what a program reads.
        write!(err, "{}", show::unjudged(&suggestions).trim_start())?;
    }
    out.flush()?;
    warn_of_namespaces(&suggestions, &owners, err)?;
    let judged = suggestions.containers.iter().any(|one| one.proposed.is_some());
    Ok(if judged { Exit::Done } else { Exit::No })
}

fn of_files(paths: &[PathBuf], namespace: Option<&str>, err: &mut dyn Write) -> anyhow::Result<Seen> {
    let mut recording = Recording::default();
    for path in paths {
        let name = if path.as_os_str() == "-" { "stdin".to_owned() } else { path.display().to_string() };
        let read = match name.as_str() {
            "stdin" => recording.add(io::stdin().lock(), namespace),
            _ => File::open(path).and_then(|file| recording.add(BufReader::new(file), namespace)),
        };
        read.with_context(|| format!("recording {name}"))?;
        let skipped = std::mem::take(&mut recording.skipped);
        if let Some((line, why)) = skipped.first {
            let lines = gpu_migrate_model::text::counted(skipped.count, "line");
            let text = format!("recording {name}: {lines} skipped, the first is line {line}: {why}");
            warn(err, &text)?;
        }
    }
    let seen = recording.finish();
    if seen.is_empty() {
        let only = namespace.map(|name| format!(" of namespace {name}")).unwrap_or_default();
        let names = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        bail!(
            "recording {}: no sample of a container with a card{only}; expected lines that `gpu-migrate top --record FILE` appends",
            names.join(", ")
        );
    }
    Ok(seen)
}

fn show(
    suggestions: &Suggestions,
    output: SuggestOutput,
    titles: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let table = || fit(&show::table(suggestions, titles), window());
    match output {
        SuggestOutput::Diff => {
            out.write_all(table().as_bytes())?;
            out.write_all(show::diffs(suggestions).as_bytes())
        }
        SuggestOutput::Table => out.write_all(table().as_bytes()),
        SuggestOutput::Json => writeln!(out, "{:#}", show::value(suggestions)),
        SuggestOutput::Yaml => {
            show::policies(suggestions).iter().try_for_each(|object| document(object, out))
        }
    }
}

fn document(object: &serde_json::Value, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "---\n{}", to_yaml(object))
}

/// A policy does nothing in a namespace that has not opted in, in `simulate` as in a cluster.
fn warn_of_namespaces(suggestions: &Suggestions, owners: &Owners, err: &mut dyn Write) -> io::Result<()> {
    let all: BTreeSet<&String> = suggestions.containers.iter().flat_map(|one| &one.namespaces).collect();
    for namespace in all {
        let labels = owners.namespace(namespace);
        if labels.is_none_or(|labels| labels.get(names::OPT_IN).map(String::as_str) != Some("true")) {
            let known = if labels.is_some() { "has no" } else { "is not known; it needs the" };
            warn(
                err,
                &format!(
                    "Namespace {namespace} {known} label {}: \"true\", without which webhook and simulate leave its pods alone",
                    names::OPT_IN
                ),
            )?;
        }
    }
    Ok(())
}

/// A length of time as Prometheus writes one: a number and `m`, `h`, `d` or `w`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// As written.
    pub text: String,
    /// The same.
    pub length: SignedDuration,
}

impl std::str::FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?}: expected a number and m, h, d or w, as in 90m, 24h or 7d");
        let unit = text.chars().last().ok_or_else(wrong)?;
        let minutes = match unit {
            'm' => 1,
            'h' => 60,
            'd' => 24 * 60,
            'w' => 7 * 24 * 60,
            _ => return Err(wrong()),
        };
        let number = text.strip_suffix(unit).unwrap_or_default();
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let number = number.parse::<i64>().ok().filter(|number| digits && *number < 1_000_000);
        let length = SignedDuration::from_mins(number.ok_or_else(wrong)? * minutes);
        Ok(Self { text: text.to_owned(), length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_written_as_for_prometheus() {
        for (text, hours) in [("90m", 1), ("24h", 24), ("7d", 168), ("2w", 336), ("0h", 0)] {
            let window: Window = text.parse().unwrap();
            assert_eq!((window.text.as_str(), window.length.as_hours()), (text, hours));
        }
        for wrong in ["", "7", "d", "-1d", "1.5h", "7 d", "7x", "9999999d", "٣d"] {
            assert!(wrong.parse::<Window>().is_err(), "{wrong}");
        }
    }
}
