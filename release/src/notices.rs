//! What our programs and images are built of, and its licences: most ask that their text is given away with the program.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::debian::Package;

/// The packages whose programs are given away.
const PROGRAMS: [&str; 5] = [
    "gpu-migrate-admission-ext",
    "gpu-migrate-cli",
    "gpu-migrate-operator",
    "gpu-migrate-plugin-bridge",
    "gpu-migrate-webhook",
];

/// A crate in a program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dependency {
    pub name: String,
    pub version: String,
    /// As an SPDX expression.
    pub licence: String,
    repository: String,
    folder: PathBuf,
}

/// The crates of others that our programs are built of, sorted. `checkout` is the workspace, whose crates cargo has downloaded.
///
/// # Errors
/// If cargo does not know the workspace.
pub fn dependencies(checkout: &Path) -> Result<Vec<Dependency>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"])
        .current_dir(checkout)
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    in_programs(&serde_json::from_slice(&output.stdout)?)
}

fn in_programs(metadata: &Value) -> Result<Vec<Dependency>> {
    let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
    let id = |value: &Value| value["id"].as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (id(&package), package)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|node| (id(&node), node)).collect();

    let mut waiting: Vec<String> = packages
        .iter()
        .filter(|(_, package)| PROGRAMS.iter().any(|name| package["name"] == *name))
        .map(|(id, _)| id.clone())
        .collect();
    ensure!(waiting.len() == PROGRAMS.len(), "cargo metadata does not name {PROGRAMS:?}");
    let mut built = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        let node = nodes.get(&id).with_context(|| format!("cargo metadata has no dependencies of {id}"))?;
        if !built.insert(id) {
            continue;
        }
        // Neither of tests nor of build scripts: those are in no program.
        let normal = |dep: &&Value| list(&dep["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let deps = list(&node["deps"]);
        waiting.extend(deps.iter().filter(normal).filter_map(|dep| dep["pkg"].as_str().map(str::to_owned)));
    }
    // Ours have no source.
    let others =
        built.iter().filter_map(|id| packages.get(id)).filter(|package| !package["source"].is_null());
    let mut all: Vec<Dependency> = others
        .map(|package| {
            let field = |name: &str| package[name].as_str().unwrap_or_default().to_owned();
            let manifest = PathBuf::from(field("manifest_path"));
            Dependency {
                name: field("name"),
                version: field("version"),
                licence: field("license"),
                repository: field("repository"),
                folder: manifest.parent().map(Path::to_owned).unwrap_or_default(),
            }
        })
        .collect();
    all.sort();
    Ok(all)
}

/// One text: each licence once, below the crates that have it.
///
/// # Errors
/// If a licence cannot be read.
pub fn text(dependencies: &[Dependency]) -> Result<String> {
    let mut texts = BTreeMap::<String, BTreeSet<String>>::new();
    for dependency in dependencies {
        let Dependency { name, version, licence, repository, folder } = dependency;
        let name = format!("{name} {version} ({licence})");
        let mut found = licences(folder).with_context(|| format!("cannot read the licence of {name}"))?;
        if found.is_empty() {
            found.push(format!("Its package has no licence file; see {repository}\n"));
        }
        for text in found {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    let mut notices = String::from("gpu-migrate contains these crates, under these licences.\n");
    let mut sorted: Vec<(&String, &BTreeSet<String>)> = texts.iter().collect();
    sorted.sort_by_key(|(_, names)| *names);
    for (text, names) in sorted {
        let _ = write!(notices, "\n{}\n", "-".repeat(80));
        for name in names {
            let _ = writeln!(notices, "{name}");
        }
        let _ = write!(notices, "\n{}\n", text.trim_end());
    }
    Ok(notices)
}

/// A bill of materials in CycloneDX 1.5: the crates in our programs and the Debian packages in our images.
#[must_use]
pub fn bill_of_materials(
    version: &str,
    created: Timestamp,
    dependencies: &[Dependency],
    packages: &[Package],
) -> Value {
    let crates = dependencies.iter().map(|Dependency { name, version, licence, .. }| {
        // Older packages separate alternatives by a slash.
        let expression = licence.replace('/', " OR ");
        json!({
            "type": "library", "bom-ref": format!("pkg:cargo/{name}@{version}"), "name": name, "version": version,
            "purl": format!("pkg:cargo/{name}@{version}"), "licenses": [{"expression": expression}],
        })
    });
    let debian = packages.iter().map(|package| {
        let (Package { name, version, .. }, purl) = (package, package.purl());
        json!({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    });
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": created.to_string(),
            "component": {"type": "application", "bom-ref": "gpu-migrate", "name": "gpu-migrate", "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": crates.chain(debian).collect::<Vec<_>>(),
    })
}

/// The texts of the licence files in a package's folder.
fn licences(folder: &Path) -> Result<Vec<String>> {
    let mut texts = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_one = ["LICENSE", "LICENCE", "COPYING", "NOTICE"].iter().any(|start| name.starts_with(start));
        if is_one && entry.file_type()?.is_file() {
            texts.insert(String::from_utf8_lossy(&fs::read(entry.path())?).replace("\r\n", "\n"));
        }
    }
    Ok(texts.into_iter().collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_crates_in_our_programs_are_named_and_those_of_tests_are_not() {
        let all = dependencies(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        let notices = text(&all).unwrap();
        let package = Package { name: "libc6", version: "2.36-9+deb12u1".into(), digest: String::new() };
        let bill = bill_of_materials("1.0.0", Timestamp::UNIX_EPOCH, &all, &[package]);
        for (name, is_in) in
            [("rustls", true), ("kube", true), ("proptest", false), ("gpu-migrate-model", false)]
        {
            assert_eq!(notices.contains(&format!("\n{name} ")), is_in, "{name}");
            let components = bill["components"].as_array().unwrap();
            assert_eq!(components.iter().any(|component| component["name"] == name), is_in, "{name}");
        }
        assert!(notices.contains("Permission is hereby granted"));
        assert!(bill.to_string().contains("pkg:deb/debian/libc6@2.36-9%2Bdeb12u1"));
        assert_eq!(bill["metadata"]["timestamp"], "1970-01-01T00:00:00Z");
    }
}
