//! `gpu-migrate-release`, see `--help`.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use gpu_migrate_release::images::Source;
use jiff::Timestamp;

/// Makes what a release consists of, from programs that are built already.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Writes the images of all components as OCI layouts (one tar each) and prints their digests. No container daemon is needed.
    /// The same programs and packages give the same digests.
    Images {
        /// The folder with the programs, built for glibc: cargo build --profile dist --bins.
        #[arg(long, default_value = "target/dist")]
        programs: PathBuf,
        /// The folder to write to: PROGRAM-TAG-ARCHITECTURE.tar.
        #[arg(long, default_value = "target/images")]
        out: PathBuf,
        /// The folder with the Debian packages of the root file system. Those that are missing are downloaded to it by apt-get.
        #[arg(long, default_value = "target/images/packages")]
        packages: PathBuf,
        #[arg(long, default_value = "ghcr.io/gpu-migrate")]
        registry: String,
        #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
        tag: String,
        /// The commit that the programs were built from (default: git's HEAD here).
        #[arg(long)]
        revision: Option<String>,
        /// The time of all files, in seconds since 1970 (default: that of git's HEAD here).
        #[arg(long, env = "SOURCE_DATE_EPOCH")]
        created: Option<i64>,
    },
}

fn main() -> Result<()> {
    let Args { command } = Args::parse();
    match command {
        Verb::Images { programs, out, packages, registry, tag, revision, created } => {
            let revision = revision.map_or_else(
                || git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]),
                Ok,
            )?;
            let created = match created {
                Some(seconds) => seconds,
                None => git(&["log", "-1", "--format=%ct"])?.parse().context("not git's commit time")?,
            };
            let created = Timestamp::from_second(created)?;
            for built in
                (Source { programs, packages, registry, tag: tag.clone(), revision, created }).build()?
            {
                let program = built.name.rsplit(['/', ':']).nth(1).unwrap_or(&built.name);
                let path = out.join(format!("{program}-{tag}-{}.tar", built.architecture));
                fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
                fs::write(&path, &built.layout.tar)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                println!("{}  {}  {}", built.layout.digest, built.name, path.display());
            }
            Ok(())
        }
    }
}

/// What git prints about this checkout.
fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).output().context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git {} failed: {}; outside a checkout give --revision and --created",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
