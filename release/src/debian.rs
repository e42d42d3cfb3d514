//! The root file system of our images: glibc and what its programs expect, from Debian packages, without a shell or a package
//! manager.
//!
//! glibc rather than a static musl: musl's allocator has a third of the throughput here. `debian_version` is where NVIDIA's
//! container runtime looks to decide which folder the driver's libraries are mounted to.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;

use crate::oci::{Entry, Layer, Tree, digest};

/// What the root file system consists of. `libgcc-s1`: unwinding, which Rust's standard library links to.
pub const PACKAGES: [&str; 4] = ["base-files", "ca-certificates", "libc6", "libgcc-s1"];

/// The user that the images of unprivileged components run as, as in Google's distroless images.
pub const NONROOT: u32 = 65532;

/// The layer of [`PACKAGES`] for an architecture, from the `.deb` files of a folder; those that are missing there are downloaded by
/// `apt-get download` of this machine, so its Debian release is that of the images.
///
/// # Errors
/// If a package cannot be had, is there in several versions, or cannot be read.
pub fn root(folder: &Path, architecture: &str, created: Timestamp) -> Result<Layer> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut tree = Tree::from([
        ("etc/group".into(), text(format!("root:x:0:\nnonroot:x:{NONROOT}:\n"))),
        ("etc/nsswitch.conf".into(), text("passwd: files\ngroup: files\nhosts: files dns\n".into())),
        (
            "etc/passwd".into(),
            text(format!(
                "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{NONROOT}:{NONROOT}:nonroot:/:/sbin/nologin\n"
            )),
        ),
        ("tmp".into(), Entry::Folder { mode: 0o1777 }),
    ]);
    for package in PACKAGES {
        let file = package_file(folder, package, architecture)?;
        add(&mut tree, package, &file).with_context(|| format!("cannot read {}", file.display()))?;
    }
    Layer::new(&bundle_certificates(tree), created)
}

/// A package of [`root`].
#[derive(Clone, Debug)]
pub struct Package {
    pub name: &'static str,
    pub version: String,
    /// Of its file.
    pub digest: String,
}

impl Package {
    /// Its package URL, by which scanners know it.
    #[must_use]
    pub fn purl(&self) -> String {
        format!("pkg:deb/debian/{}@{}", self.name, self.version.replace('+', "%2B").replace('~', "%7E"))
    }
}

/// The packages of [`root`].
///
/// # Errors
/// As those of [`root`].
pub fn packages(folder: &Path, architecture: &str) -> Result<Vec<Package>> {
    let package = |name| {
        let file = package_file(folder, name, architecture)?;
        let control = dpkg_deb(&["--field"], &file)?;
        let control = String::from_utf8_lossy(&control).into_owned();
        let version = control.lines().find_map(|line| line.strip_prefix("Version: "));
        let version = version.with_context(|| format!("{name} has no version"))?.to_owned();
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Package { name, version, digest: digest(&content) })
    };
    PACKAGES.into_iter().map(package).collect()
}

fn text(content: String) -> Entry {
    Entry::File { mode: 0o644, content: content.into_bytes() }
}

/// The package's file in the folder, downloaded if there is none.
fn package_file(folder: &Path, package: &str, architecture: &str) -> Result<PathBuf> {
    if let Some(file) = find(folder, package, architecture)? {
        return Ok(file);
    }
    let name = format!("{package}:{architecture}");
    let status = Command::new("apt-get")
        .args(["--quiet", "--quiet", "--option", "APT::Sandbox::User=root", "download", &name])
        .current_dir(folder)
        .status()
        .with_context(|| {
            format!(
                "cannot run apt-get; run this on Debian, or put {package}'s .deb into {}",
                folder.display()
            )
        })?;
    ensure!(
        status.success(),
        "apt-get download {name} failed; if the architecture is unknown to it: dpkg --add-architecture {architecture} && apt-get update"
    );
    find(folder, package, architecture)?
        .with_context(|| format!("apt-get downloaded {name}, but it is not in {}", folder.display()))
}

fn find(folder: &Path, package: &str, architecture: &str) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let for_it = [architecture, "all"].iter().any(|which| name.ends_with(&format!("_{which}.deb")));
        if for_it && name.starts_with(&format!("{package}_")) {
            found.push(path);
        }
    }
    ensure!(found.len() < 2, "several versions of {package}: {found:?}; keep one of them");
    Ok(found.pop())
}

/// Adds the wanted files of a package, and its description where vulnerability scanners look for it in an image without dpkg.
fn add(tree: &mut Tree, package: &str, file: &Path) -> Result<()> {
    let control = dpkg_deb(&["--field"], file)?;
    tree.insert(format!("var/lib/dpkg/status.d/{package}"), Entry::File { mode: 0o644, content: control });
    let files = dpkg_deb(&["--fsys-tarfile"], file)?;
    for entry in tar::Archive::new(files.as_slice()).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().trim_start_matches("./").to_owned();
        if !is_wanted(&path) {
            continue;
        }
        let header = entry.header();
        let kind = header.entry_type();
        let made = if kind.is_file() {
            let mode = header.mode()?;
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            Entry::File { mode, content }
        } else if kind.is_symlink() {
            Entry::Link(entry.link_name()?.context("a link without a target")?.to_string_lossy().into_owned())
        } else {
            bail!("{path} is neither a file nor a symbolic link")
        };
        tree.insert(path, made);
    }
    Ok(())
}

/// Shared libraries, certificates, licences, and what the system calls itself.
fn is_wanted(path: &str) -> bool {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    match folder {
        "etc" => matches!(name, "debian_version" | "os-release"),
        "usr/lib" => name == "os-release",
        "lib64" => name.starts_with("ld-linux"),
        // arm64's loader.
        "lib" => name.starts_with("ld-linux-"),
        _ if folder.starts_with("usr/share/ca-certificates/") => name.ends_with(".crt"),
        _ if folder.starts_with("usr/share/doc/") => name == "copyright",
        _ => {
            let parent = folder.strip_prefix("usr/").unwrap_or(folder);
            parent.strip_prefix("lib/").is_some_and(|triplet| triplet.ends_with("-linux-gnu"))
                && name.contains(".so")
        }
    }
}

/// One file of all certificates instead of many, as `update-ca-certificates` makes it on an installed system.
fn bundle_certificates(tree: Tree) -> Tree {
    let (certificates, mut rest): (Tree, Tree) =
        tree.into_iter().partition(|(path, _)| path.starts_with("usr/share/ca-certificates/"));
    let mut bundle = Vec::new();
    for entry in certificates.into_values() {
        if let Entry::File { content, .. } = entry {
            bundle.extend(content);
        }
    }
    rest.insert("etc/ssl/certs/ca-certificates.crt".into(), Entry::File { mode: 0o644, content: bundle });
    rest
}

fn dpkg_deb(arguments: &[&str], file: &Path) -> Result<Vec<u8>> {
    let output = Command::new("dpkg-deb")
        .args(arguments)
        .arg(file)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run dpkg-deb (Debian package dpkg)")?;
    ensure!(output.status.success(), "dpkg-deb {} ended with {}", arguments.join(" "), output.status);
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    #[test]
    fn libraries_are_wanted_and_programs_are_not() {
        for (path, wanted) in [
            ("lib/x86_64-linux-gnu/libc.so.6", true),
            ("usr/lib/aarch64-linux-gnu/libgcc_s.so.1", true),
            ("lib64/ld-linux-x86-64.so.2", true),
            ("lib/ld-linux-aarch64.so.1", true),
            ("etc/debian_version", true),
            ("usr/share/doc/libc6/copyright", true),
            ("usr/share/ca-certificates/mozilla/A.crt", true),
            ("usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", false),
            ("usr/sbin/update-ca-certificates", false),
            ("usr/share/doc/libc6/changelog.Debian.gz", false),
            ("lib/x86_64-linux-gnu/", false),
            ("", false),
        ] {
            assert_eq!(super::is_wanted(path), wanted, "{path}");
        }
    }
}
