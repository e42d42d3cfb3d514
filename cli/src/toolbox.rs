//! What the program says about itself: completion scripts, man pages, resource definitions.

use crate::args::{self, CompletionArgs, CrdsArgs, ManArgs};
use crate::complete;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// `gpu-migrate completion SHELL`.
///
/// # Errors
/// When `out` cannot be written.
pub(crate) fn completion(args: &CompletionArgs, out: &mut dyn Write) -> io::Result<()> {
    complete::script(args.shell, out)
}

/// `gpu-migrate man DIR`: one page per command.
///
/// # Errors
/// When the folder cannot be made or written.
pub(crate) fn man(args: &ManArgs, out: &mut dyn Write) -> io::Result<()> {
    fs::create_dir_all(&args.dir)?;
    clap_mangen::generate_to(args::command(None), &args.dir)?;
    writeln!(out, "man pages written to {}", args.dir.display())
}

/// `gpu-migrate crds`.
///
/// # Errors
/// When `out` or the folder cannot be written.
pub(crate) fn crds(args: &CrdsArgs, out: &mut dyn Write) -> io::Result<()> {
    let files = crate::crds::files();
    let Some(dir) = &args.dir else {
        for file in &files {
            write!(out, "---\n{}", file.yaml)?;
        }
        return Ok(());
    };
    fs::create_dir_all(dir)?;
    for file in &files {
        fs::write(dir.join(&file.name), &file.yaml)?;
        writeln!(out, "{}", Path::new(dir).join(&file.name).display())?;
    }
    Ok(())
}
