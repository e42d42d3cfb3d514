//! `prepare [kubectl] [helm] [promtool] [prometheus]`: builds what the tests run from Go modules, unless it is installed or in the cache, and prints
//! the folders of these programs, one a line, for the `PATH`. Without a name it builds all that the scenarios need.

use anyhow::{Context, Result, bail};
use gpu_migrate_cluster_tests::binaries::{self, Binaries};

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if names.is_empty() {
        Binaries::prepare()?;
        binaries::helm()?;
    }
    for name in &names {
        let program = match name.as_str() {
            "helm" => binaries::helm()?,
            "kubectl" => binaries::kubectl()?,
            "promtool" | "prometheus" => binaries::prometheus(name)?,
            other => {
                bail!(
                    "there is no program {other:?} to prepare; known are kubectl, helm, promtool and prometheus"
                )
            }
        };
        println!("{}", program.parent().context("a file has a folder")?.display());
    }
    Ok(())
}
