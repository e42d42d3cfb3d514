//! Compiles the client. It is a program of its own: what is measured is what any program gets, and our own have no unsafe code.

use std::{env, error::Error, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=client/client.c");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join("client");
    let compiler = cc::Build::new().opt_level(1).debug(false).try_get_compiler()?;
    let mut command = compiler.to_command();
    // gnu17: since C23 `f()` has no parameters, and before any. dlopen is in a library of its own before glibc 2.34.
    command.args(["-std=gnu17", "-Wl,--as-needed", "-o"]).arg(out).arg("client/client.c").arg("-ldl");
    let status = command.status()?;
    if !status.success() {
        return Err(
            format!("{command:?} failed ({status}): a C compiler and glibc's headers are needed").into()
        );
    }
    Ok(())
}
