//! The `pinfold` command.

fn main() -> std::process::ExitCode {
    pinfold_cli::main()
}
