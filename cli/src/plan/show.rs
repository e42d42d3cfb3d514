//! A plan on the screen and in a pipe.

use super::diff::{to_yaml, unified};
use super::projects::table;
use super::{Converted, Entry, Outcome, Plan};
use crate::style::{ADDED, FAINT, HEAD, PLACE, REMOVED, WARNING, fit, paint, window};
use anstyle::Style;
use serde_json::{Value, json};
use std::io::{self, Write};

/// Every object that changes as a diff.
///
/// # Errors
/// When `out` cannot be written.
pub fn diffs(plan: &Plan, context: usize, out: &mut dyn Write) -> io::Result<()> {
    for (entry, converted) in plan.converted() {
        let manifest = &entry.manifest;
        let name = paint(HEAD, &manifest.to_string());
        writeln!(out, "{name}  {}", paint(FAINT, &manifest.origin.to_string()))?;
        for line in &converted.warnings {
            writeln!(out, "{line}")?;
        }
        for note in &converted.notes {
            writeln!(out, "{} {note}", paint(WARNING, "note:"))?;
        }
        let names =
            ("as written", if manifest.kind == "Pod" { "as it will run" } else { "as its pods will run" });
        writeln!(out, "{}", unified(&manifest.value, &converted.after, names, context))?;
    }
    Ok(())
}

/// What became of every object, in groups, each with its reasons; and what it comes to for each project.
///
/// # Errors
/// When `out` cannot be written.
pub fn summary(plan: &Plan, titles: bool, out: &mut dyn Write) -> io::Result<()> {
    let count = |wanted: fn(&Outcome) -> bool| {
        let entries = plan.entries.iter().filter(|entry| wanted(&entry.outcome));
        entries.map(|entry| 1 + entry.manifest.more).sum::<usize>()
    };
    let converted = count(|o| matches!(o, Outcome::Converted(_)));
    let alone = count(|o| matches!(o, Outcome::LeftAlone { .. } | Outcome::InNoWave { .. }));
    let refused = count(|o| matches!(o, Outcome::CannotConvert { .. }));
    let indirect = count(|o| matches!(o, Outcome::Indirect { .. }));
    let mut title = format!("{converted} converted, {alone} left alone, {refused} cannot be converted");
    if indirect > 0 {
        title += &format!(", {indirect} of other controllers");
    }
    writeln!(out, "{}", paint(HEAD, &title))?;
    match plan.without_pods {
        0 => {}
        1 => writeln!(out, "(1 other object makes no pods)")?,
        n => writeln!(out, "({n} other objects make no pods)")?,
    }
    group(out, "Converted", ADDED, plan, |outcome| match outcome {
        Outcome::Converted(converted) => {
            let notes = converted.notes.iter().filter(|note| note.starts_with("it requests shares of"));
            Some(notes.fold(converted.change(), |text, note| format!("{text}; {note}")))
        }
        _ => None,
    })?;
    let others = "Of other controllers (their pods are converted as they are created; the operator does not restart them)";
    group(out, others, WARNING, plan, |outcome| match outcome {
        Outcome::Indirect { why, .. } => Some(why.clone()),
        _ => None,
    })?;
    group(out, "Left alone", PLACE, plan, |outcome| match outcome {
        Outcome::LeftAlone { why } | Outcome::InNoWave { why } => Some(why.clone()),
        _ => None,
    })?;
    group(out, "Cannot be converted", REMOVED, plan, |outcome| match outcome {
        Outcome::CannotConvert { why, then } => Some(format!("{why} ({then})")),
        _ => None,
    })?;
    if !plan.projects.is_empty() {
        write!(out, "\n{}", fit(&table(&plan.projects, titles), window()))?;
    }
    Ok(())
}

fn group(
    out: &mut dyn Write,
    title: &str,
    style: Style,
    plan: &Plan,
    text: impl Fn(&Outcome) -> Option<String>,
) -> io::Result<()> {
    let rows = plan
        .entries
        .iter()
        .filter_map(|entry| text(&entry.outcome).map(|text| (entry, entry.manifest.to_string(), text)))
        .collect::<Vec<_>>();
    if rows.is_empty() {
        return Ok(());
    }
    let width = rows.iter().map(|(_, name, _)| name.chars().count()).max().unwrap_or(0);
    writeln!(out, "\n{}", paint(style, title))?;
    for (entry, name, text) in rows {
        let origin = paint(FAINT, &entry.manifest.origin.to_string());
        write!(out, "{}", fit(&format!("  {name:width$}  {text}  {origin}\n"), window()))?;
    }
    Ok(())
}

/// The patches as one JSON array, each with the object it is for.
///
/// # Errors
/// When `out` cannot be written.
pub fn patches(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let all = plan.converted().map(|(entry, converted)| patch_of(entry, converted)).collect::<Vec<_>>();
    writeln!(out, "{:#}", Value::Array(all))
}

fn patch_of(entry: &Entry, converted: &Converted) -> Value {
    let manifest = &entry.manifest;
    json!({
        "apiVersion": manifest.api_version,
        "kind": manifest.kind,
        "namespace": manifest.namespace,
        "name": manifest.name,
        "source": manifest.origin.to_string(),
        "policy": converted.policy,
        "patch": converted.patch,
    })
}

/// The rewritten objects as a YAML stream.
///
/// # Errors
/// When `out` cannot be written.
pub fn yaml(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    for (entry, converted) in plan.converted() {
        write!(out, "---\n# {}\n{}", entry.manifest.origin, to_yaml(&converted.after))?;
    }
    Ok(())
}

/// The names of the objects that change.
///
/// # Errors
/// When `out` cannot be written.
pub fn names(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    for (Entry { manifest, .. }, _) in plan.converted() {
        let group = manifest.api_version.split_once('/').map(|(group, _)| format!(".{group}"));
        writeln!(out, "{}{}/{}", manifest.kind.to_lowercase(), group.unwrap_or_default(), manifest.name)?;
    }
    Ok(())
}

/// The rewritten objects as one v1 List, with the numbers of the projects beside them: kubectl does not look at those.
///
/// # Errors
/// When `out` cannot be written.
pub fn json(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let items = plan.converted().map(|(_, converted)| converted.after.clone()).collect::<Vec<_>>();
    writeln!(
        out,
        "{:#}",
        json!({"apiVersion": "v1", "kind": "List", "items": items, "projects": plan.projects})
    )
}
