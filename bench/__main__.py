import sys

from bench.command import main, use_this_tree

if __name__ == "__main__":
    use_this_tree(sys.argv[1:])
    sys.exit(main())
